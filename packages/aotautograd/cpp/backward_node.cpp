#include "backward_node.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include <algorithm>
#include <numeric>

namespace aotautograd {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

template <typename T, typename... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    // Deletes long chains of nodes without recursion.
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

// Whether the engine's present run comes to a node.
bool will_run(Node* node) {
  if (node == nullptr) return false;
  const auto* found = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (found == nullptr || found->count(node) == 0) return false;
  const auto* infos = torch::autograd::get_current_graph_task_exec_info();
  if (infos == nullptr || infos->empty()) return true;
  const auto info = infos->find(node);
  return info != infos->end() && info->second.should_execute();
}

// Whether hooks see the gradient of a result, or it is asked for.
bool is_observed(Node* node) {
  if (!node->tensor_pre_hooks().empty() || !node->retains_grad_hooks().empty() || !node->pre_hooks().empty() ||
      !node->post_hooks().empty()) {
    return true;
  }
  const auto* infos = torch::autograd::get_current_graph_task_exec_info();
  if (infos == nullptr || infos->empty()) return false;
  const auto info = infos->find(node);
  return info != infos->end() && info->second.captures_;
}

}  // namespace

// ---- one node -------------------------------------------------------------------------------------------------------

variable_list WholeBackward::apply(variable_list&& gradients) {
  missing_ = missing_of(gradients);
  std::vector<GradientEdge> edges(num_outputs());
  for (size_t i = 0; i < edges.size(); i++) edges[i] = {this, i};
  return call_->gradients(std::move(gradients), edges, consume_, this);
}

// Autograd frees what the nodes keep through which it went.
void WholeBackward::release_variables() {
  py::gil_scoped_acquire gil;
  call_->release(missing_);
  consume_ = false;
}

// ---- several --------------------------------------------------------------------------------------------------------

std::shared_ptr<Run> CallNodes::run() {
  const int id = torch::autograd::get_current_graph_task_id();
  if (id < 0) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Run> run = runs_[id].lock();
  if (run) return run;
  for (auto place = runs_.begin(); place != runs_.end();) {
    place = place->second.expired() ? runs_.erase(place) : std::next(place);
  }
  run = std::make_shared<Run>();
  run->tangents.resize(results.size());
  run->came.resize(results.size());
  runs_[id] = run;
  // What the engine is to call in the end, it drops however it ends.
  torch::autograd::Engine::get_default_engine().queue_callback([run] {});
  return run;
}

ResultNode::ResultNode(std::shared_ptr<Call> call, std::shared_ptr<CallNodes> nodes, uint32_t tangent)
    : CompiledNode(std::move(call)), nodes_(std::move(nodes)), tangent_(tangent) {
  nodes_->results[tangent] = this;
}

ResultNode::~ResultNode() { nodes_->results[tangent_] = nullptr; }

variable_list ResultNode::apply(variable_list&& gradients) {
  if (const auto run = nodes_->run()) {
    const std::lock_guard<std::mutex> lock(run->mutex);
    run->tangents[tangent_] = gradients[0];
    run->came[tangent_] = true;
  }
  return variable_list(num_outputs(), gradients[0]);
}

const std::vector<uint32_t>& CallNodes::observed(Run& run, const History& history) const {
  if (run.observed) return *run.observed;
  run.observed.emplace();
  for (uint32_t i = 0; i < results.size(); i++) {
    Node* node = results[i];
    const auto& leading = history.leading[i];
    if (leading.empty() || !will_run(node) || !is_observed(node)) continue;
    const auto runs = [&](uint32_t other) { return will_run(results[other]); };
    if (std::any_of(leading.begin(), leading.end(), runs)) run.observed->push_back(i);
  }
  return *run.observed;
}

variable_list InnerNode::apply(variable_list&& tangents) {
  const auto run = nodes_->run();
  if (!run) return variable_list(1);
  const History& history = call_->history();
  const std::lock_guard<std::mutex> lock(run->mutex);
  const std::vector<uint32_t>& observed = nodes_->observed(*run, history);
  if (std::find(observed.begin(), observed.end(), tangent_) == observed.end()) return variable_list(1);
  variable_list all(history.tangents.size());
  for (size_t i = 0; i < inputs.size(); i++) all[inputs[i]] = std::move(tangents[i]);
  return call_->inner_gradient(std::move(all), observed, tangent_, this);
}

SetNode::SetNode(std::shared_ptr<Call> call, std::shared_ptr<CallNodes> nodes, size_t set)
    : CompiledNode(std::move(call)), nodes_(std::move(nodes)), set_(set) {
  nodes_->sets[set] = this;
}

SetNode::~SetNode() { nodes_->sets[set_] = nullptr; }

// The engine runs results' nodes first, as they are younger than those of sets: all tangents are there. Where it does
// not, for it has threads for devices and counts nodes by thread, each set has those that lead to it.
void SetNode::begin(Run& run) {
  bool all = nodes_->observed(run, call_->history()).empty();
  for (size_t i = 0; i < nodes_->results.size(); i++) all &= run.came[i] || !will_run(nodes_->results[i]);
  if (all) {
    run.edges = edges_of_run();
    LaterStages* later = call_->history().stages > 1 ? &run.later : nullptr;
    run.gradients = call_->gradients(std::move(run.tangents), run.edges, consume_, this, later);
  } else {
    run.gradients.resize(call_->history().places.size());
  }
  for (const auto& node : nodes_->sets) run.left += will_run(node);
  run.manner = all ? Run::kTogether : Run::kApart;
}

std::vector<GradientEdge> SetNode::edges_of_run() const {
  const History& history = call_->history();
  std::vector<GradientEdge> edges(history.places.size());
  for (size_t i = 0; i < edges.size(); i++) {
    if (!history.places[i]) continue;
    Node* node = nodes_->sets[history.places[i]->set];
    if (will_run(node)) edges[i] = {node, history.places[i]->place};
  }
  return edges;
}

// The gradients of this set, and in `run` those of the stages that follow it.
variable_list SetNode::of_this_set(variable_list&& tangents, Run* run) {
  const History& history = call_->history();
  variable_list all(history.tangents.size());
  for (size_t i = 0; i < tangents.size(); i++) all[inputs[i]] = std::move(tangents[i]);
  std::vector<GradientEdge> edges(history.places.size());
  for (size_t i = 0; i < set().gradients.size(); i++) edges[set().gradients[i]] = {this, i};
  for (size_t i = 0; i < edges.size() && run != nullptr; i++) {
    const auto& place = history.places[i];
    if (!place || history.sets[place->set].tangents != set().tangents) continue;
    Node* node = nodes_->sets[place->set];
    if (will_run(node)) edges[i] = {node, place->place};
  }
  const bool cut = run != nullptr && !nodes_->observed(*run, history).empty();
  variable_list gradients = cut ? call_->cut_gradients(std::move(all), edges, *run->observed, this)
                                : call_->gradients(std::move(all), edges, false, this);
  if (run == nullptr) {
    variable_list own;
    for (const uint32_t i : set().gradients) own.push_back(std::move(gradients[i]));
    own.resize(num_outputs());
    return own;
  }
  for (size_t i = 0; i < edges.size(); i++) {
    if (edges[i].node != nullptr) run->gradients[i] = std::move(gradients[i]);
  }
  return hand_on(*run);
}

// An empty tensor goes from the node of a stage to that of the next, so that this runs on the thread of the device.
at::Tensor token(const History& history) {
  const at::AutoDispatchBelowADInplaceOrView below;  // neither autograd nor a mode of the program's is told
  return at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(history.expected[0].device));
}

variable_list SetNode::hand_on(Run& run) {
  while (run.later.next && run.later.done < set().stage) {
    variable_list more = call_->next_stage(run.later, run.edges);
    for (size_t i = 0; i < more.size(); i++) {
      if (more[i].defined()) run.gradients[i] = std::move(more[i]);
    }
  }
  variable_list own;
  for (const uint32_t i : set().gradients) own.push_back(std::move(run.gradients[i]));
  if (num_outputs() > own.size()) own.push_back(token(call_->history()));
  return own;
}

variable_list SetNode::apply(variable_list&& tangents) {
  const auto run = nodes_->run();
  const bool first = set().follows < 0;
  if (!run) {  // the caller calls the node, not the engine
    return first ? of_this_set(std::move(tangents), nullptr) : variable_list(num_outputs());
  }
  const std::lock_guard<std::mutex> lock(run->mutex);  // before the GIL, which another thread may need to come to an end
  if (run->manner == Run::kOpen) begin(*run);
  run->left--;
  if (run->manner == Run::kApart && first) return of_this_set(std::move(tangents), run.get());
  return hand_on(*run);
}

void SetNode::release_variables() {
  consume_ = false;
  const auto run = nodes_->run();
  if (!run) return;
  const std::lock_guard<std::mutex> lock(run->mutex);
  // Torch calls this for nodes that it deletes, too: those of a call that raised within another's backward never ran.
  if (run->manner == Run::kOpen || run->released || (run->manner == Run::kApart && run->left > 0)) return;
  run->released = true;
  std::vector<uint32_t> missing;
  for (uint32_t i = 0; i < run->came.size(); i++) {
    if (!run->came[i]) missing.push_back(i);
  }
  py::gil_scoped_acquire gil;
  call_->release(missing);
}

// ---- making them ----------------------------------------------------------------------------------------------------

NodeMaker::NodeMaker(std::shared_ptr<Call> call, torch::autograd::edge_list edges) : call_(std::move(call)) {
  const History& history = call_->history();
  if (history.one_node) {
    made_.push_back(make_node<WholeBackward>(call_));
    made_.back()->set_next_edges(std::move(edges));
    return;
  }
  nodes_ = std::make_shared<CallNodes>(history.tangents.size(), history.sets.size());
  for (size_t i = 0; i < history.sets.size(); i++) {
    sets_.push_back(make_node<SetNode>(call_, nodes_, i));
    for (const uint32_t gradient : history.sets[i].gradients) sets_.back()->add_next_edge(std::move(edges[gradient]));
  }
  for (size_t i = 0; i < history.sets.size(); i++) {
    if (history.sets[i].follows < 0) continue;
    const uint32_t place = sets_[i]->add_input_metadata(token(history));
    sets_[history.sets[i].follows]->add_next_edge(Edge(sets_[i], place));
  }
}

void NodeMaker::finish() {
  const History& history = call_->history();
  if (history.one_node) return torch::autograd::set_history(results_[0], made_[0]);
  made_.resize(results_.size());
  inner_.resize(results_.size());
  std::vector<uint32_t> order(results_.size());
  std::iota(order.begin(), order.end(), 0);
  // A node has its edges before others lead to it: what a result is computed from has more results leading to it.
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return history.leading[a].size() > history.leading[b].size();
  });
  for (const uint32_t tangent : order) connect(tangent);
  for (size_t i = 0; i < results_.size(); i++) torch::autograd::set_history(results_[i], made_[i]);
}

void NodeMaker::connect(uint32_t tangent) {
  const History& history = call_->history();
  made_[tangent] = make_node<ResultNode>(call_, nodes_, tangent);
  for (size_t i = 0; i < sets_.size(); i++) {
    const auto& leading = history.sets[i].tangents;
    if (history.sets[i].follows >= 0) continue;
    if (!std::binary_search(leading.begin(), leading.end(), tangent)) continue;
    made_[tangent]->add_next_edge(Edge(sets_[i], sets_[i]->add_input_metadata(results_[tangent])));
    static_cast<SetNode*>(sets_[i].get())->inputs.push_back(tangent);
  }
  for (uint32_t i = 0; i < inner_.size(); i++) {
    const auto& leading = history.leading[i];
    if (!inner_[i] || std::find(leading.begin(), leading.end(), tangent) == leading.end()) continue;
    made_[tangent]->add_next_edge(Edge(inner_[i], inner_[i]->add_input_metadata(results_[tangent])));
    static_cast<InnerNode*>(inner_[i].get())->inputs.push_back(tangent);
  }
  if (history.leading[tangent].empty()) return;
  inner_[tangent] = make_node<InnerNode>(call_, nodes_, tangent);
  inner_[tangent]->add_next_edge(Edge(made_[tangent], 0));
}

// ---- the nodes in Python --------------------------------------------------------------------------------------------

namespace {

PyObject* get_saved_tensors(PyObject* self, void*) {
  try {
    auto* node = static_cast<CompiledNode*>(reinterpret_cast<torch::autograd::THPCppFunction*>(self)->cdata.get());
    return node->saved_tensors().release().ptr();
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

using namespace torch::autograd;  // the macro below names its members

PyGetSetDef properties[] = {THP_FUNCTION_DEFAULT_PROPERTIES,
                            {"saved_tensors", get_saved_tensors, nullptr, "what the forward kept", nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject node_type;

}  // namespace

void add_node_type(py::module_& module) {
  torch::autograd::_initFunctionPyTypeObject(node_type, "CompiledProgramBackward", properties, nullptr);
  Py_INCREF(&node_type);
  module.add_object("CompiledProgramBackward", reinterpret_cast<PyObject*>(&node_type));
  for (const std::type_info* type : {&typeid(WholeBackward), &typeid(ResultNode), &typeid(InnerNode),
                                     &typeid(SetNode)}) {
    torch::autograd::registerCppFunction(*type, &node_type);
  }
}

}  // namespace aotautograd

#include "call.h"

// Before the header of the older wrappers, whose functions have the same names.
#include <ATen/functorch/BatchedTensorImpl.h>

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <algorithm>

namespace aotautograd {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

py::object new_tuple(size_t size) {
  return py::reinterpret_steal<py::object>(PyTuple_New(static_cast<Py_ssize_t>(size)));
}

py::list new_list(size_t size) {
  return py::reinterpret_steal<py::list>(PyList_New(static_cast<Py_ssize_t>(size)));
}

// How often an input was written: 0 for a size, and for an inference tensor, which does not count.
uint32_t version_of(PyObject* input) {
  if (!THPVariable_Check(input)) return 0;
  const auto& counter = THPVariable_Unpack(input).unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

bool same_memory_order(c10::IntArrayRef sizes, c10::IntArrayRef found, c10::IntArrayRef expected) {
  for (size_t d = 0; d < sizes.size(); d++) {
    if (sizes[d] != 1 && found[d] != expected[d]) return false;
  }
  return true;
}

// What `torch.vmap` makes of a tensor: one of its batches' tensors, as the program sees it, wraps them all.
struct Batch {
  int64_t level;
  bool legacy;  // of `is_grads_batched` and `vectorize`, which have a wrapper of their own
  int64_t size;

  static std::optional<Batch> of(const at::Tensor& tensor) {
    if (!tensor.defined()) return std::nullopt;
    if (const auto* wrapper = at::functorch::maybeGetBatchedImpl(tensor)) {
      return Batch{wrapper->level(), false, wrapper->value().sym_size(wrapper->bdim()).guard_int(__FILE__, __LINE__)};
    }
    if (!at::isBatchedTensor(tensor)) return std::nullopt;
    const auto* wrapper = at::unsafeGetBatchedImpl(tensor);
    const at::BatchDim& last = wrapper->bdims().back();
    return Batch{last.level(), true, wrapper->value().size(last.dim())};
  }

  bool wraps(const at::Tensor& tensor) const {
    const auto own = of(tensor);
    return own && own->level == level && own->legacy == legacy;
  }

  at::Tensor one(const at::Tensor& tensor, int64_t place) const {
    if (!wraps(tensor)) return tensor;
    if (!legacy) {
      const auto* wrapper = at::functorch::maybeGetBatchedImpl(tensor);
      return wrapper->value().select(wrapper->bdim(), place);
    }
    const auto* wrapper = at::unsafeGetBatchedImpl(tensor);
    const int64_t dim = wrapper->bdims().back().dim();
    const at::Tensor value = wrapper->value().select(dim, place);
    at::BatchDims outer;
    for (const at::BatchDim& other : wrapper->bdims().slice(0, wrapper->bdims().size() - 1)) {
      outer.emplace_back(other.level(), other.dim() - (other.dim() > dim ? 1 : 0));
    }
    return outer.empty() ? value : at::makeBatched(value, outer);
  }

  at::Tensor all(const std::vector<at::Tensor>& each) const {
    const at::Tensor stacked = at::stack(each);
    return legacy ? at::addBatchDim(stacked, level, 0) : at::functorch::makeBatched(stacked, 0, level);
  }
};

// The innermost of a call's tensors.
std::optional<Batch> batch_of(const variable_list& tensors) {
  std::optional<Batch> found;
  for (const at::Tensor& tensor : tensors) {
    const auto own = Batch::of(tensor);
    if (own && (!found || own->level > found->level)) found = own;
  }
  return found;
}

// Whether a gradient without another owner would be taken for `.grad`.
bool becomes_grad(const torch::autograd::Edge& edge) {
  auto* function = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
  if (function == nullptr || function->variable.grad().defined() || c10::GradMode::is_enabled()) return false;
  const auto* infos = torch::autograd::get_current_graph_task_exec_info();
  if (infos == nullptr || infos->empty()) return true;
  const auto info = infos->find(function);  // not where the caller is given the gradient
  return info != infos->end() && !info->second.captures_;
}

// Brings tangents into the layouts that the backward was compiled for.
class Layouts {
 public:
  Layouts(const History& history, const py::object& scalars) : history_(history), scalars_(scalars) {}

  // Zeros for one that did not come.
  at::Tensor fit(size_t tangent, at::Tensor gradient) {
    const TangentLayout& layout = history_.expected[tangent];
    if (layout.known) return fit(layout, std::move(gradient), layout.sizes, layout.strides);
    if (!computed_) computed_ = history_.layouts(scalars_ ? scalars_ : py::tuple());  // none kept: all were fixed
    const auto [sizes, strides] =
        py::object(computed_[py::int_(tangent)]).cast<std::pair<std::vector<int64_t>, std::vector<int64_t>>>();
    return fit(layout, std::move(gradient), sizes, strides);
  }

 private:
  static at::Tensor fit(const TangentLayout& layout, at::Tensor gradient, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
    const auto options = at::TensorOptions().dtype(layout.dtype).device(layout.device);
    if (!gradient.defined()) return at::empty_strided(sizes, strides, options).zero_();
    // One that wraps others has no layout of its own: the backward is compiled for that of its parts.
    if (gradient.key_set().has(c10::DispatchKey::Python)) return gradient;
    if (gradient.is_conj()) gradient = gradient.resolve_conj();
    if (gradient.is_neg()) gradient = gradient.resolve_neg();
    if (gradient._is_zerotensor()) return at::empty_strided(sizes, strides, options).zero_();  // it has no memory
    if (gradient.layout() == at::kStrided) {
      if (gradient.strides() == strides) return gradient;
      // They differ where nothing is stepped over.
      if (same_memory_order(sizes, gradient.strides(), strides)) return gradient.as_strided(sizes, strides);
    }
    return at::empty_strided(sizes, strides, options).copy_(gradient);
  }

  const History& history_;
  const py::object& scalars_;  // the kept sizes
  py::object computed_;        // (sizes, strides) of each tangent
};

variable_list to_variables(const py::object& results, size_t count) {
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(results.ptr(), "a compiled backward returned no sequence"));
  if (!items) throw python_error();
  const auto found = static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
  TORCH_CHECK(found == count, "a compiled backward returned ", found, " gradients instead of ", count);
  variable_list gradients(count);
  PyObject** item = PySequence_Fast_ITEMS(items.ptr());
  for (size_t i = 0; i < count; i++) {
    if (item[i] == Py_None) continue;
    TORCH_CHECK_TYPE(THPVariable_Check(item[i]), "a compiled backward returned a ", Py_TYPE(item[i])->tp_name,
                     " as gradient ", i);
    gradients[i] = THPVariable_Unpack(item[i]);
  }
  return gradients;
}

// Runs a part of a node under the GIL, and so that what is raised in Python outlives it.
template <typename Part>
variable_list in_python(const Part& part) {
  py::gil_scoped_acquire gil;
  try {
    return part();
  } catch (python_error& error) {
    error.persist();
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
    python_error persistent;
    persistent.persist();
    throw persistent;
  }
}

}  // namespace

Call::~Call() {
  if (Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    drop({});
    scalars_ = py::object();
    program_.reset();
  } else {  // the interpreter is gone, and its objects with it
    scalars_.release();
    held_.release();
    new std::shared_ptr<const Program>(std::move(program_));
    new SavedTensors(std::move(saved_));
  }
}

// What is kept is for a backward that may follow: a derivative of it reads the inputs.
void Call::drop(const std::vector<size_t>& kept) {
  if (kept.empty()) {
    saved_.release_all_but({});
    held_ = py::object();
    return;
  }
  const std::vector<size_t>& inputs = history().held_saved;
  std::vector<size_t> all;
  std::set_union(kept.begin(), kept.end(), inputs.begin(), inputs.end(), std::back_inserter(all));
  saved_.release_all_but(all);
}

// Of the saved tensors in this run. Throws what autograd throws where another run has freed them.
const Needs& Call::needs(const std::vector<uint32_t>& missing) const {
  const Needs& needs = program_->needs(missing, earlier_);
  TORCH_CHECK(!needs.spent, torch::autograd::ERR_BACKWARD_TWICE);
  return needs;
}

// Autograd frees what the nodes keep through which it went: here, what the backward of the missing tangents does not read
// elsewhere.
void Call::release(const std::vector<uint32_t>& missing) {
  drop(missing.empty() ? std::vector<size_t>() : program_->needs(missing, earlier_).keeps);
  for (uint32_t i = 0; i < history().tangents.size(); i++) {
    const auto place = std::lower_bound(earlier_.begin(), earlier_.end(), i);
    const bool came = !std::binary_search(missing.begin(), missing.end(), i);
    if (came && (place == earlier_.end() || *place != i)) earlier_.insert(place, i);
  }
}

void Call::keep(PyObject* const* kept, size_t count, py::object held, c10::ArrayRef<NodePtr> makers) {
  const History& plan = history();
  saved_.save(kept, plan.saved, makers);
  if (count > plan.saved) {
    scalars_ = new_tuple(count - plan.saved);
    for (size_t i = plan.saved; i < count; i++) {
      PyTuple_SET_ITEM(scalars_.ptr(), static_cast<Py_ssize_t>(i - plan.saved), Py_NewRef(kept[i]));
    }
  }
  held_ = std::move(held);
  const auto count_held = static_cast<size_t>(PyTuple_GET_SIZE(held_.ptr()));
  versions_.reserve(count_held);
  for (size_t i = 0; i < count_held; i++) {
    versions_.push_back(version_of(PyTuple_GET_ITEM(held_.ptr(), static_cast<Py_ssize_t>(i))));
  }
}

py::object held_inputs(const History& history, const py::list& inputs) {
  py::object held = new_tuple(history.held_count);
  Py_ssize_t place = 0;
  for (size_t i = 0; i < history.held.size(); i++) {
    if (history.held[i] != kHeld) continue;
    PyTuple_SET_ITEM(held.ptr(), place++, Py_NewRef(PyList_GET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i))));
  }
  return held;
}

py::list Call::saved_tensors(Node* reader) const {
  py::list tensors = new_list(saved_.size());
  saved_.unpack(program_->needs({}, {}).reads, tensors.ptr(), 0, reader);
  return tensors;
}

// The gradients; nobody but the list holds them, unless the caller holds a tangent.
variable_list Call::assemble(const std::vector<GradientSource>& sources, py::object results,
                             const variable_list& tangents, const std::vector<GradientEdge>& edges) {
  size_t expected = sources.size();
  for (const GradientSource& source : sources) {
    if (!source.from_tangent) expected = std::max(expected, source.slot + 1);
  }
  const variable_list returned = to_variables(results, expected);
  results = py::object();
  variable_list gradients(sources.size());
  for (size_t i = 0; i < sources.size(); i++) {
    const GradientSource& source = sources[i];
    const variable_list& given = source.from_tangent ? tangents : returned;
    const auto [node, edge] = edges[i];
    if (!given[source.slot].defined() || node == nullptr || !node->task_should_compute_output(edge)) continue;
    gradients[i] = given[source.slot];
    if (source.views) {
      auto base = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradients[i]));
      const py::object view = source.views(base, scalars_ ? scalars_ : py::tuple());
      gradients[i] = THPVariable_Unpack(view.ptr());
    }
    if ((source.cloned || source.views) && becomes_grad(node->next_edge(edge))) {
      const auto* accumulator = static_cast<torch::autograd::AccumulateGrad*>(node->next_edge(edge).function.get());
      const at::Tensor& variable = accumulator->variable;
      // A view holds its base, which is somebody's gradient as well and would be copied for having two owners.
      gradients[i] = source.cloned ? torch::autograd::utils::clone_obey_contract(gradients[i], variable)
                                   : gradients[i].detach();
    }
  }
  return gradients;
}

variable_list Call::run_backward(variable_list tangents, const std::vector<uint32_t>& missing,
                                 const std::vector<GradientEdge>& edges, bool consume, Node* reader,
                                 LaterStages* later) {
  const Backward& backward = program_->backward(missing);
  variable_list handed_on(tangents.size());  // as they came
  for (const GradientSource& source : backward.sources) {
    if (source.from_tangent) handed_on[source.slot] = tangents[source.slot];
  }
  const size_t scalars = scalars_ ? static_cast<size_t>(PyTuple_GET_SIZE(scalars_.ptr())) : 0;
  const Needs& needs = this->needs(missing);
  size_t place = scalars + needs.reads.size();
  const auto taken = std::count(backward.takes.begin(), backward.takes.end(), true);
  py::list inputs = new_list(place + static_cast<size_t>(taken));
  saved_.unpack(needs.reads, inputs.ptr(), scalars, reader);
  for (size_t i = 0; i < scalars; i++) {
    PyObject* scalar = PyTuple_GET_ITEM(scalars_.ptr(), static_cast<Py_ssize_t>(i));
    PyList_SET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(scalar));
  }
  Layouts layouts(history(), scalars_);
  for (size_t i = 0; i < tangents.size(); i++) {
    if (!backward.takes[i]) continue;
    at::Tensor tangent = layouts.fit(i, std::move(tangents[i]));
    PyList_SET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(place++), THPVariable_Wrap(std::move(tangent)));
  }
  // Unless the graph is retained, the list is now all that holds what was saved: a compiled backward that empties it
  // frees each activation after its last use.
  if (consume) drop(needs.keeps);
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  py::object results = call_compiled(backward.compiled, backward.boxed, std::move(inputs));
  if (history().stages > 1) return of_stages(backward, std::move(results), std::move(handed_on), edges, later);
  return assemble(backward.sources, std::move(results), handed_on, edges);
}

LaterStages::~LaterStages() {
  if (!next) return;
  if (Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    next = py::object();
  } else {
    next.release();
  }
}

// The edges of one stage's gradients.
std::vector<GradientEdge> Call::of_stage(uint32_t stage, std::vector<GradientEdge> edges) const {
  const History& plan = history();
  for (size_t i = 0; i < edges.size(); i++) {
    if (plan.places[i] && plan.sets[plan.places[i]->set].stage != stage) edges[i] = GradientEdge();
  }
  return edges;
}

variable_list Call::of_stages(const Backward& backward, py::object next, variable_list tangents,
                              const std::vector<GradientEdge>& edges, LaterStages* later) {
  LaterStages here;
  LaterStages& run = later == nullptr ? here : *later;
  run.next = std::move(next);
  run.tangents = std::move(tangents);
  run.sources = &backward.sources;
  variable_list gradients = assemble(backward.sources, run.next(), run.tangents, of_stage(0, edges));
  while (later == nullptr && run.next) {
    variable_list more = next_stage(run, edges);
    for (size_t i = 0; i < more.size(); i++) {
      if (more[i].defined()) gradients[i] = std::move(more[i]);
    }
  }
  return gradients;
}

variable_list Call::next_stage(LaterStages& run, const std::vector<GradientEdge>& edges) {
  return in_python([&] {
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    const bool last = ++run.done + 1 == history().stages;
    py::object results = run.next();
    if (last) run.next = py::object();
    return assemble(*run.sources, std::move(results), run.tangents, of_stage(run.done, edges));
  });
}

std::array<py::list, 3> Call::given_to_programs(const variable_list& tangents, const std::vector<uint32_t>& missing,
                                               Node* reader) {
  const History& plan = history();
  for (const size_t i : needs(missing).reads) {
    TORCH_CHECK(saved_.has(i), torch::autograd::ERR_BACKWARD_TWICE);
  }
  py::list saved = new_list(saved_.size());
  for (size_t i = 0; i < saved_.size(); i++) {
    if (saved_.has(i)) {
      saved_.unpack({i}, saved.ptr(), i, reader);
    } else {
      PyList_SET_ITEM(saved.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(Py_None));
    }
  }
  py::list inputs = new_list(plan.held.size());
  size_t next = 0;
  for (size_t i = 0; i < plan.held.size(); i++) {
    PyObject* input = Py_None;
    if (plan.held[i] >= 0) {
      input = PyList_GET_ITEM(saved.ptr(), plan.held[i]);
    } else if (plan.held[i] == kHeld && held_) {
      input = PyTuple_GET_ITEM(held_.ptr(), static_cast<Py_ssize_t>(next));
      if (version_of(input) != versions_[next++]) {
        raise("InputMismatch",
              "an input of the compiled program was modified in place after the forward, and a derivative of the "
              "backward needs its old value");
      }
    }
    PyList_SET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(input));
  }
  Layouts layouts(plan, scalars_);
  py::list given = new_list(tangents.size());
  for (size_t i = 0; i < tangents.size(); i++) {
    at::Tensor tangent = layouts.fit(i, tangents[i]);
    PyList_SET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(std::move(tangent)));
  }
  return {std::move(inputs), std::move(saved), std::move(given)};
}

variable_list Call::run_differentiably(variable_list tangents, const std::vector<uint32_t>& missing,
                                       const std::vector<GradientEdge>& edges, Node* reader) {
  const auto [inputs, saved, given] = given_to_programs(tangents, missing, reader);
  const py::tuple made = history().gradients(inputs, saved, given, py::cast(missing));
  return assemble(read_sources(made[1]), made[0], tangents, edges);
}

variable_list Call::cut_gradients(variable_list tangents, const std::vector<GradientEdge>& edges,
                                  const std::vector<uint32_t>& observed, Node* reader) {
  return in_python([&] {
    const std::vector<uint32_t> missing = missing_of(tangents);
    if (missing.size() == tangents.size()) return variable_list(edges.size());
    const auto [inputs, saved, given] = given_to_programs(tangents, missing, reader);
    const py::tuple made = history().cut(inputs, saved, given, py::cast(missing), py::cast(observed), py::none());
    return assemble(read_sources(made[1]), made[0], tangents, edges);
  });
}

variable_list Call::inner_gradient(variable_list tangents, const std::vector<uint32_t>& observed, uint32_t inner,
                                Node* reader) {
  return in_python([&] {
    const std::vector<uint32_t> missing = missing_of(tangents);
    if (missing.size() == tangents.size()) return variable_list(1);
    const auto [inputs, saved, given] = given_to_programs(tangents, missing, reader);
    const py::object made = history().cut(inputs, saved, given, py::cast(missing), py::cast(observed), inner);
    return variable_list{made.is_none() ? at::Tensor() : THPVariable_Unpack(made.ptr())};
  });
}

std::vector<uint32_t> missing_of(const variable_list& tangents) {
  std::vector<uint32_t> missing;
  for (size_t i = 0; i < tangents.size(); i++) {
    if (!tangents[i].defined()) missing.push_back(static_cast<uint32_t>(i));
  }
  return missing;
}

// Compiled kernels read memory, which a tensor around others has none of: its class says what the backward does with it.
bool Call::is_apart(const variable_list& tangents) const {
  if (history().apart.is_none()) return false;
  return std::any_of(tangents.begin(), tangents.end(), [&](const at::Tensor& tangent) {
    if (!tangent.defined() || !tangent.key_set().has(c10::DispatchKey::Python)) return false;
    return history().apart(py::reinterpret_steal<py::object>(THPVariable_Wrap(tangent))).cast<bool>();
  });
}

variable_list Call::gradients(variable_list tangents, const std::vector<GradientEdge>& edges, bool consume,
                              Node* reader, LaterStages* later) {
  return in_python([&] {
    const std::vector<uint32_t> missing = missing_of(tangents);
    if (missing.size() == tangents.size()) return variable_list(edges.size());
    if (batch_of(tangents)) return of_each(tangents, edges, consume, reader);
    const bool programs = c10::GradMode::is_enabled() || is_apart(tangents);
    return programs ? run_differentiably(std::move(tangents), missing, edges, reader)
                    : run_backward(std::move(tangents), missing, edges, consume, reader, later);
  });
}

// Compiled kernels read memory, which a batch's wrapper has none of: the backward runs for each of the batch.
variable_list Call::of_each(const variable_list& tangents, const std::vector<GradientEdge>& edges, bool consume,
                            Node* reader) {
  const Batch batch = *batch_of(tangents);
  TORCH_CHECK(batch.size > 0, "the backward of a compiled program was asked for no gradients (a vmap over none)");
  std::vector<std::vector<at::Tensor>> found(edges.size());
  for (int64_t place = 0; place < batch.size; place++) {
    variable_list own(tangents.size());
    for (size_t i = 0; i < tangents.size(); i++) own[i] = batch.one(tangents[i], place);
    variable_list gradients = this->gradients(std::move(own), edges, consume && place + 1 == batch.size, reader);
    for (size_t i = 0; i < gradients.size(); i++) {
      if (gradients[i].defined()) found[i].push_back(std::move(gradients[i]));
    }
  }
  variable_list gradients(edges.size());
  for (size_t i = 0; i < found.size(); i++) {
    if (!found[i].empty()) gradients[i] = batch.all(found[i]);
  }
  return gradients;
}

}  // namespace aotautograd

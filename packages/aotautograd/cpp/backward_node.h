// The autograd nodes of one call of a compiled program.
//
// A single result that leads to all gradients has one node. Elsewhere each result has a node of its own, with an edge to
// a node for each set of gradients that it leads to, so that autograd comes to the inputs that eager's comes to. All
// gradients are computed by the first of these nodes that runs.
//
// In stages, each set has a node for each turn, with an edge to that of the next: a stage computes the gradients of one
// turn or of several, one after the other. The nodes of a turn are younger than those of the next, so that the engine
// runs all of them, and what their gradients lead to, before it goes on.
#pragma once

#include "call.h"

#include <atomic>
#include <map>

namespace aotautograd {

// One run of autograd's engine through a call of several nodes. The run owns it.
struct Run {
  std::mutex mutex;
  torch::autograd::variable_list tangents;
  std::vector<bool> came;                    // for each tangent: whether its result's node has run
  torch::autograd::variable_list gradients;  // computed, and not handed on yet
  enum { kOpen, kTogether, kApart } manner = kOpen;  // together: one backward computes all; apart: one for each set
  size_t left = 0;                           // nodes of sets that have still to run
  std::vector<GradientEdge> edges;           // of the gradients in this run
  LaterStages later;
  bool released = false;
  std::optional<std::vector<uint32_t>> observed;  // results with hooks that see what comes to them from others
};

// The nodes of a call, which go when nothing leads to them any more, and the engine's runs through them.
class CallNodes {
 public:
  CallNodes(size_t results, size_t sets) : results(results), sets(sets) {}

  // The engine's run that asks; null outside of one.
  std::shared_ptr<Run> run();

  // The results of a run whose hooks see, or whose gradients are asked for, where other results lead to them.
  const std::vector<uint32_t>& observed(Run& run, const History& history) const;

  std::vector<std::atomic<torch::autograd::Node*>> results, sets;

 private:
  std::mutex mutex_;
  std::map<int, std::weak_ptr<Run>> runs_;
};

class CompiledNode : public torch::autograd::Node {
 public:
  explicit CompiledNode(std::shared_ptr<Call> call) : call_(std::move(call)) {}
  std::string name() const override { return "CompiledProgramBackward"; }
  py::list saved_tensors() { return call_->saved_tensors(this); }

 protected:
  const std::shared_ptr<Call> call_;
};

// Leads from the one result to all gradients.
class WholeBackward final : public CompiledNode {
 public:
  using CompiledNode::CompiledNode;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  void will_release_variables() override { consume_ = true; }  // not where the graph is retained
  void release_variables() override;

 private:
  bool consume_ = false;
  std::vector<uint32_t> missing_;  // tangents that did not come in this run: their backward may follow
};

// Leads from one result to the sets of gradients that depend on it.
class ResultNode final : public CompiledNode {
 public:
  ResultNode(std::shared_ptr<Call> call, std::shared_ptr<CallNodes> nodes, uint32_t tangent);
  ~ResultNode() override;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  const std::shared_ptr<CallNodes> nodes_;
  const uint32_t tangent_;
};

// Leads from results to one that they are computed from. It hands something on only where somebody looks at that.
class InnerNode final : public CompiledNode {
 public:
  InnerNode(std::shared_ptr<Call> call, std::shared_ptr<CallNodes> nodes, uint32_t tangent)
      : CompiledNode(std::move(call)), nodes_(std::move(nodes)), tangent_(tangent) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::vector<uint32_t> inputs;  // the tangent of each

 private:
  const std::shared_ptr<CallNodes> nodes_;
  const uint32_t tangent_;
};

// Leads to one set of gradients.
class SetNode final : public CompiledNode {
 public:
  SetNode(std::shared_ptr<Call> call, std::shared_ptr<CallNodes> nodes, size_t set);
  ~SetNode() override;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  void will_release_variables() override { consume_ = true; }
  void release_variables() override;
  std::vector<uint32_t> inputs;  // the tangent of each, where results lead to it

 private:
  const GradientSet& set() const { return call_->history().sets[set_]; }
  void begin(Run& run);
  std::vector<GradientEdge> edges_of_run() const;
  torch::autograd::variable_list of_this_set(torch::autograd::variable_list&& tangents, Run* run);
  torch::autograd::variable_list hand_on(Run& run);

  const std::shared_ptr<CallNodes> nodes_;
  const size_t set_;
  bool consume_ = false;
};

// Makes the nodes of a call.
class NodeMaker {
 public:
  // `edges`: where each gradient goes.
  NodeMaker(std::shared_ptr<Call> call, torch::autograd::edge_list edges);
  // Takes the result of each tangent, in their order.
  void connect(const at::Tensor& result) { results_.push_back(result); }
  // Gives them their histories.
  void finish();
  c10::ArrayRef<NodePtr> behind_results() const { return made_; }

 private:
  const std::shared_ptr<Call> call_;
  void connect(uint32_t tangent);

  std::vector<at::Tensor> results_;
  std::vector<NodePtr> made_, sets_, inner_;
  std::shared_ptr<CallNodes> nodes_;
};

// The Python type of the nodes: what `grad_fn` gives.
void add_node_type(py::module_& module);

}  // namespace aotautograd

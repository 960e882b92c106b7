// What one call of a compiled program keeps for its backward, and how it computes the gradients.
#pragma once

#include "program.h"
#include "saved.h"

#include <array>
#include <mutex>

namespace aotautograd {

// An edge of a node that a gradient leaves by.
struct GradientEdge {
  const torch::autograd::Node* node = nullptr;  // null: this run of autograd does not come there
  size_t edge = 0;
};

// What a run of a backward in stages has still to compute.
struct LaterStages {
  LaterStages() = default;
  LaterStages(const LaterStages&) = delete;
  LaterStages& operator=(const LaterStages&) = delete;
  ~LaterStages();

  py::object next;  // computes the next stage; null: all gradients are there
  uint32_t done = 0;
  torch::autograd::variable_list tangents;  // as they came
  const std::vector<GradientSource>* sources = nullptr;
};

// The nodes of a call share it. Everything it holds in Python is read and dropped under the GIL, which stands in for the
// nodes' mutexes.
class Call {
 public:
  explicit Call(std::shared_ptr<const Program> program) : program_(std::move(program)) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();

  const History& history() const { return *program_->history; }

  // Keeps what the forward gave beside its outputs (tensors, then sizes), and the inputs that a derivative of the
  // backward reads. `makers` are the nodes of the outputs.
  void keep(PyObject* const* kept, size_t count, py::object held, c10::ArrayRef<NodePtr> makers);

  // The gradients that these tangents lead to, from the compiled backward; under create_graph, from a program whose
  // results have a history. With `consume` it frees what it reads, and that is not left to the backward of others.
  // With `later`, those of the first stage: of the others `next_stage` gives one after the other.
  torch::autograd::variable_list gradients(torch::autograd::variable_list tangents,
                                           const std::vector<GradientEdge>& edges, bool consume,
                                           torch::autograd::Node* reader, LaterStages* later = nullptr);
  // Those for tangents that `torch.vmap` has wrapped.
  torch::autograd::variable_list of_each(const torch::autograd::variable_list& tangents,
                                         const std::vector<GradientEdge>& edges, bool consume,
                                         torch::autograd::Node* reader);
  torch::autograd::variable_list next_stage(LaterStages& later, const std::vector<GradientEdge>& edges);

  // The same where the results `observed` have hooks that see what comes to them from other results: the tangents of
  // these are the sums, and what the others lead to by way of them is in those.
  torch::autograd::variable_list cut_gradients(torch::autograd::variable_list tangents,
                                               const std::vector<GradientEdge>& edges,
                                               const std::vector<uint32_t>& observed, torch::autograd::Node* reader);

  // What comes to the observed result number `inner` from others.
  torch::autograd::variable_list inner_gradient(torch::autograd::variable_list tangents,
                                                const std::vector<uint32_t>& observed, uint32_t inner,
                                                torch::autograd::Node* reader);

  // Behind a run without the tangents `missing`.
  void release(const std::vector<uint32_t>& missing);

  py::list saved_tensors(torch::autograd::Node* reader) const;

 private:
  torch::autograd::variable_list run_backward(torch::autograd::variable_list tangents,
                                              const std::vector<uint32_t>& missing,
                                              const std::vector<GradientEdge>& edges, bool consume,
                                              torch::autograd::Node* reader, LaterStages* later);
  torch::autograd::variable_list of_stages(const Backward& backward, py::object next,
                                           torch::autograd::variable_list tangents,
                                           const std::vector<GradientEdge>& edges, LaterStages* later);
  std::vector<GradientEdge> of_stage(uint32_t stage, std::vector<GradientEdge> edges) const;
  torch::autograd::variable_list run_differentiably(torch::autograd::variable_list tangents,
                                                    const std::vector<uint32_t>& missing,
                                                    const std::vector<GradientEdge>& edges,
                                                    torch::autograd::Node* reader);
  // The inputs, what is kept and the tangents, for a program that computes the forward again.
  std::array<py::list, 3> given_to_programs(const torch::autograd::variable_list& tangents,
                                            const std::vector<uint32_t>& missing, torch::autograd::Node* reader);
  torch::autograd::variable_list assemble(const std::vector<GradientSource>& sources, py::object results,
                                          const torch::autograd::variable_list& tangents,
                                          const std::vector<GradientEdge>& edges);
  bool is_apart(const torch::autograd::variable_list& tangents) const;
  const Needs& needs(const std::vector<uint32_t>& missing) const;
  void drop(const std::vector<size_t>& kept);

  std::shared_ptr<const Program> program_;
  SavedTensors saved_;
  py::object scalars_;  // a tuple: the kept sizes
  py::object held_;     // a tuple: the inputs of the forward that History::held says are held
  std::vector<uint32_t> versions_;  // of the tensors in held_, 0 for the others
  std::vector<uint32_t> earlier_;   // tangents of runs that have freed what they read, in order
};

// The tangents that did not come.
std::vector<uint32_t> missing_of(const torch::autograd::variable_list& tangents);

// The tuple of the inputs to hold.
py::object held_inputs(const History& history, const py::list& inputs);

}  // namespace aotautograd

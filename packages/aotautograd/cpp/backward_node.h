// The autograd node of one call of a compiled program.
#pragma once

#include "program.h"
#include "saved.h"

namespace aotautograd {

// Runs the compiled backward; under create_graph, a program whose results have a history. Everything it holds in Python
// is read and dropped under the GIL, which stands in for the node's mutex.
class CompiledBackward : public torch::autograd::Node {
 public:
  explicit CompiledBackward(std::shared_ptr<const Program> program) : program_(std::move(program)) {}
  ~CompiledBackward() override;

  // Keeps what the forward gave beside its outputs (tensors, then sizes), and the inputs that a derivative of the
  // backward reads.
  void keep(PyObject* const* kept, size_t count, py::object held);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  void will_release_variables() override { consume_ = true; }  // not where the graph is retained
  void release_variables() override;
  std::string name() const override { return "CompiledProgramBackward"; }

  py::list saved_tensors();

 private:
  const History& history() const { return *program_->history; }
  torch::autograd::variable_list run_backward(torch::autograd::variable_list tangents,
                                              const std::vector<uint32_t>& missing);
  torch::autograd::variable_list run_differentiably(torch::autograd::variable_list tangents,
                                                    const std::vector<uint32_t>& missing);
  torch::autograd::variable_list assemble(const std::vector<GradientSource>& sources, py::object results,
                                          const torch::autograd::variable_list& tangents);
  bool becomes_grad(size_t edge) const;
  const Needs& needs() const;
  void drop(const std::vector<size_t>& kept);

  std::shared_ptr<const Program> program_;
  SavedTensors saved_;
  py::object scalars_;  // a tuple: the kept sizes
  py::object held_;     // a tuple: the inputs of the forward that History::held says are held
  std::vector<uint32_t> versions_;  // of the tensors in held_, 0 for the others
  bool consume_ = false;
  std::vector<uint32_t> missing_;  // tangents that did not come in this run: their backward may follow
  std::vector<uint32_t> earlier_;  // those of runs that have freed what they read, in order
};

// The tuple of the inputs to hold.
py::object held_inputs(const History& history, const py::list& inputs);

// The Python type of the node: what `grad_fn` gives.
void add_node_type(py::module_& module);

}  // namespace aotautograd

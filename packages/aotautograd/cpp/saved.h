// The tensors that a forward keeps for its backward.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace aotautograd {

namespace py = pybind11;

// A reference-counted node: std::shared_ptr or c10::intrusive_ptr, as the version of torch has it.
using NodePtr = decltype(std::declval<torch::autograd::Node&>().getptr());

// Keeps the Python tensors themselves and their versions, which costs a fraction of a SavedVariable each. Where
// saved-tensor hooks are on, or a tensor is one that autograd must be asked about, it keeps SavedVariables.
// The GIL protects it.
class SavedTensors {
 public:
  SavedTensors() = default;
  // `owner` made some of them: those must not hold it.
  void save(PyObject* const* tensors, size_t count, torch::autograd::Node* owner);
  // The tensors as Python objects, appended to `list` from `place` on. Throws what autograd throws where one was
  // modified, or where they were released.
  void unpack(PyObject* list, size_t place, torch::autograd::Node* owner) const;
  void release();
  size_t size() const { return count_; }

 private:
  void check_versions() const;

  size_t count_ = 0;
  bool released_ = false;
  py::object tensors_;  // a tuple
  std::vector<uint32_t> versions_;
  std::vector<torch::autograd::SavedVariable> hooked_;
};

}  // namespace aotautograd

// The tensors that a forward keeps for its backward.
#pragma once

#include <pybind11/pybind11.h>
#include <c10/util/ArrayRef.h>
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
  struct Layout {
    std::vector<int64_t> sizes, strides;
  };

  SavedTensors() = default;
  // The nodes `makers` made some of them: those must not hold them.
  void save(PyObject* const* tensors, size_t count, c10::ArrayRef<NodePtr> makers);
  // The tensors at `places` as Python objects, appended to `list` from `place` on. Throws what autograd throws where one
  // of them was modified, or was released; `reader` is the node that reads them.
  void unpack(const std::vector<size_t>& places, PyObject* list, size_t place, torch::autograd::Node* reader) const;
  bool has(size_t place) const { return !released_[place]; }
  // All but those at `places`, which are in order.
  void release_all_but(const std::vector<size_t>& places);
  size_t size() const { return count_; }

 private:
  void check_version(size_t place) const;

  size_t count_ = 0;
  std::vector<bool> released_;
  std::vector<py::object> tensors_;
  std::vector<uint32_t> versions_;
  std::vector<torch::autograd::SavedVariable> hooked_;
  std::vector<Layout> layouts_;  // of what went through the hooks
};

}  // namespace aotautograd

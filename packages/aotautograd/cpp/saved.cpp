#include "saved.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <sstream>

namespace aotautograd {
namespace {

using torch::autograd::AutogradMeta;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

bool is_made_by(const c10::TensorImpl* tensor, c10::ArrayRef<NodePtr> nodes) {
  const auto* meta = static_cast<const AutogradMeta*>(tensor->autograd_meta());
  if (meta == nullptr || !meta->grad_fn_) return false;
  return std::find(nodes.begin(), nodes.end(), meta->grad_fn_) != nodes.end();
}

// What a hook gives back in the strides that the backward was compiled for: one that offloads may well close gaps, or
// give rows. Those of dims of size one do not count, and a tensor of another size is not ours to judge.
at::Tensor laid_out(at::Tensor given, const SavedTensors::Layout& kept) {
  if (given.layout() != at::kStrided || given.unsafeGetTensorImpl()->is_python_dispatch()) return given;
  if (given.sizes() != c10::IntArrayRef(kept.sizes) || given.numel() == 0) return given;
  bool same = true;
  for (size_t i = 0; i < kept.sizes.size(); i++) same &= kept.sizes[i] == 1 || given.strides()[i] == kept.strides[i];
  return same ? given : at::empty_strided(kept.sizes, kept.strides, given.options()).copy_(given);
}

}  // namespace

void SavedTensors::save(PyObject* const* tensors, size_t count, c10::ArrayRef<NodePtr> makers) {
  count_ = count;
  released_.assign(count, false);
  if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) {
    hooked_.reserve(count);
    layouts_.resize(count);
    for (size_t i = 0; i < count; i++) {
      const at::Tensor& tensor = THPVariable_Unpack(tensors[i]);
      const bool is_output = is_made_by(tensor.unsafeGetTensorImpl(), makers);
      if (tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
        layouts_[i] = {tensor.sizes().vec(), tensor.strides().vec()};
      }
      hooked_.emplace_back(is_output ? tensor.tensor_data() : tensor, false);
    }
    return;
  }
  versions_.reserve(count);
  tensors_.reserve(count);
  for (size_t i = 0; i < count; i++) {
    const at::Tensor& tensor = THPVariable_Unpack(tensors[i]);
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    // An inference tensor counts no writes; a SavedVariable says what autograd says of it.
    if (!impl->version_counter().enabled()) SavedVariable(tensor, false);
    versions_.push_back(impl->version_counter().current_version());
    const bool is_output = Py_REFCNT(tensors[i]) > 1 && is_made_by(impl, makers);
    PyObject* kept = is_output ? THPVariable_Wrap(tensor.tensor_data()) : Py_NewRef(tensors[i]);
    tensors_.push_back(py::reinterpret_steal<py::object>(kept));
  }
}

void SavedTensors::unpack(const std::vector<size_t>& places, PyObject* list, size_t place, Node* reader) const {
  for (const size_t i : places) TORCH_CHECK(has(i), torch::autograd::ERR_BACKWARD_TWICE);
  for (const size_t i : places) {
    PyObject* tensor;
    if (hooked_.empty()) {
      check_version(i);
      tensor = Py_NewRef(tensors_[i].ptr());
    } else {
      tensor = THPVariable_Wrap(laid_out(hooked_[i].unpack(reader->getptr()), layouts_[i]));
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(place++), tensor);
  }
}

void SavedTensors::check_version(size_t place) const {
  const at::Tensor& tensor = THPVariable_Unpack(tensors_[place].ptr());
  const auto version = tensor.unsafeGetTensorImpl()->version_counter().current_version();
  TORCH_CHECK(version == versions_[place],
              "one of the variables needed for gradient computation has been modified by an inplace operation: [",
              tensor.toString(), " ", tensor.sizes(), "], kept by a compiled program, is at version ", version,
              "; expected version ", versions_[place], ". Write the new values to another tensor, or clone this one");
}

void SavedTensors::release_all_but(const std::vector<size_t>& places) {
  auto kept = places.begin();
  for (size_t i = 0; i < count_; i++) {
    if (kept != places.end() && *kept == i) {
      ++kept;
    } else if (has(i)) {
      released_[i] = true;
      if (i < tensors_.size()) tensors_[i] = py::object();
      if (i < hooked_.size()) hooked_[i] = SavedVariable();  // a hook that raised has left fewer
    }
  }
}

}  // namespace aotautograd

#include "saved.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>

namespace aotautograd {
namespace {

using torch::autograd::AutogradMeta;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

bool is_made_by(const c10::TensorImpl* tensor, const Node* node) {
  const auto* meta = static_cast<const AutogradMeta*>(tensor->autograd_meta());
  return meta != nullptr && meta->grad_fn_.get() == node;
}

}  // namespace

void SavedTensors::save(PyObject* const* tensors, size_t count, Node* owner) {
  count_ = count;
  if (count == 0) return;
  if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) {
    hooked_.reserve(count);
    for (size_t i = 0; i < count; i++) {
      const at::Tensor& tensor = THPVariable_Unpack(tensors[i]);
      hooked_.emplace_back(tensor, is_made_by(tensor.unsafeGetTensorImpl(), owner));
    }
    return;
  }
  versions_.reserve(count);
  tensors_ = py::reinterpret_steal<py::object>(PyTuple_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; i < count; i++) {
    const at::Tensor& tensor = THPVariable_Unpack(tensors[i]);
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    // An inference tensor counts no writes; a SavedVariable says what autograd says of it.
    if (!impl->version_counter().enabled()) SavedVariable(tensor, false);
    versions_.push_back(impl->version_counter().current_version());
    const bool is_output = Py_REFCNT(tensors[i]) > 1 && is_made_by(impl, owner);
    PyObject* kept = is_output ? THPVariable_Wrap(tensor.tensor_data()) : Py_NewRef(tensors[i]);
    PyTuple_SET_ITEM(tensors_.ptr(), static_cast<Py_ssize_t>(i), kept);
  }
}

void SavedTensors::unpack(PyObject* list, size_t place, Node* owner) const {
  TORCH_CHECK(!released_ || count_ == 0, torch::autograd::ERR_BACKWARD_TWICE);
  if (!hooked_.empty()) {
    for (const SavedVariable& saved : hooked_) {
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(place++), THPVariable_Wrap(saved.unpack(owner->getptr())));
    }
    return;
  }
  check_versions();
  for (size_t i = 0; i < count_; i++) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors_.ptr(), static_cast<Py_ssize_t>(i));
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(place++), Py_NewRef(tensor));
  }
}

void SavedTensors::check_versions() const {
  for (size_t i = 0; i < count_; i++) {
    const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(tensors_.ptr(), static_cast<Py_ssize_t>(i)));
    const auto version = tensor.unsafeGetTensorImpl()->version_counter().current_version();
    TORCH_CHECK(version == versions_[i],
                "one of the variables needed for gradient computation has been modified by an inplace operation: [",
                tensor.toString(), " ", tensor.sizes(), "], kept by a compiled program, is at version ", version,
                "; expected version ", versions_[i], ". Write the new values to another tensor, or clone this one");
  }
}

void SavedTensors::release() {
  released_ = true;
  tensors_ = py::object();
  versions_.clear();
  hooked_.clear();
}

}  // namespace aotautograd

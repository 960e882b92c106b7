#include "tensor_guard.h"

#ifndef TORCHDYNAMO_WITHOUT_TORCH

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

namespace torchdynamo {
namespace {

constexpr int64_t kDynamic = INT64_MIN;

Ref field(PyObject* record, const char* name) { return Ref::steal(PyObject_GetAttrString(record, name)); }

bool read_bool(PyObject* record, const char* name, bool* out) {
  Ref value = field(record, name);
  int truth = value ? PyObject_IsTrue(value.get()) : -1;
  *out = truth > 0;
  return truth >= 0;
}

bool read_optional_bool(PyObject* record, const char* name, std::optional<bool>* out) {
  Ref value = field(record, name);
  if (!value) return false;
  if (value.get() == Py_None) return true;
  int truth = PyObject_IsTrue(value.get());
  *out = truth > 0;
  return truth >= 0;
}

bool read_numbers(PyObject* record, const char* name, std::vector<int64_t>* out) {
  Ref value = field(record, name);
  Ref items = value ? Ref::steal(PySequence_Tuple(value.get())) : Ref();
  if (!items) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); i++) {
    PyObject* item = PyTuple_GET_ITEM(items.get(), i);
    out->push_back(item == Py_None ? kDynamic : PyLong_AsLongLong(item));
    if (PyErr_Occurred()) return false;
  }
  return true;
}

bool read_dtype(PyObject* value, at::ScalarType* out) {
  if (value == nullptr || !THPDtype_Check(value)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "expected a torch.dtype");
    return false;
  }
  *out = reinterpret_cast<THPDtype*>(value)->scalar_type;
  return true;
}

bool matches(c10::IntArrayRef actual, const std::vector<int64_t>& expected) {
  if (actual.size() != expected.size()) return false;
  for (size_t i = 0; i < expected.size(); i++) {
    if (actual[i] != expected[i] && expected[i] != kDynamic) return false;
  }
  return true;
}

// Whether autograd's engine runs something of the program's where a gradient comes to a tensor: hooks on the tensor, on
// what accumulates its gradient, or what keeps the gradient of a tensor that is no leaf. Hooks that were removed count.
bool has_gradient_hooks(const at::Tensor& tensor) {
  namespace impl = torch::autograd::impl;
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
  if (meta == nullptr) return false;
  if (!meta->hooks_.empty() || meta->post_acc_grad_hooks_ != nullptr || meta->retains_grad_) return true;
  const auto accumulator = impl::try_get_grad_accumulator(tensor);
  torch::autograd::Node* node = meta->grad_fn_ ? meta->grad_fn_.get() : accumulator.get();
  if (node == nullptr) return false;
  if (!node->tensor_pre_hooks().empty() || !node->retains_grad_hooks().empty()) return true;
  return meta->grad_fn_ == nullptr && !(node->pre_hooks().empty() && node->post_hooks().empty());
}

class MetadataCheck final : public TensorCheck {
 public:
  bool read(PyObject* record) {
    type_ = field(record, "type");
    Ref dtype = field(record, "dtype");
    Ref device = field(record, "device");
    if (!type_ || !read_dtype(dtype.get(), &dtype_) || !device) return false;
    if (!THPDevice_Check(device.get())) {
      PyErr_SetString(PyExc_TypeError, "expected a torch.device");
      return false;
    }
    device_ = reinterpret_cast<THPDevice*>(device.get())->device;
    type_meta_ = c10::scalarTypeToTypeMeta(dtype_);
    bool is_parameter = false;
    if (!read_bool(record, "requires_grad", &requires_grad_) || !read_bool(record, "is_parameter", &is_parameter) ||
        !read_numbers(record, "sizes", &sizes_) || !read_numbers(record, "strides", &strides_) ||
        !read_optional_bool(record, "is_leaf", &is_leaf_) || !read_optional_bool(record, "has_grad", &has_grad_) ||
        !read_bool(record, "no_hooks", &no_hooks_)) {
      return false;
    }
    // A class that inherits from Parameter says it by its type; a marked instance of another class needs a look.
    marked_parameter_ = is_parameter && !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type_.get()),
                                                          reinterpret_cast<PyTypeObject*>(ParameterClass));
    Ref keys = field(record, "dispatch_keys");
    if (!keys) return false;
    if (keys.get() != Py_None) {
      keys_ = PyLong_AsUnsignedLongLong(keys.get());
      if (PyErr_Occurred()) return false;
    }
    return true;
  }

  bool holds(PyObject* object) const override {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.get() || !THPVariable_Check(object)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(object);
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (impl->dtype() != type_meta_ || impl->device() != device_) return false;
    if (keys_ && impl->key_set().raw_repr() != *keys_) return false;
    try {
      if (!matches(impl->sizes(), sizes_)) return false;
      if (impl->layout() == c10::kStrided ? !matches(impl->strides(), strides_) : !strides_.empty()) return false;
      if (!gradient_matches(tensor)) return false;
      if (no_hooks_ && has_gradient_hooks(tensor)) return false;
    } catch (const std::exception&) {
      return false;  // a tensor whose sizes are not plain numbers is not the one that capture saw
    }
    return !marked_parameter_ || is_marked(object);
  }

  bool same_as(const MetadataCheck& other) const {
    return type_.get() == other.type_.get() && type_meta_ == other.type_meta_ && device_ == other.device_ &&
           requires_grad_ == other.requires_grad_ && marked_parameter_ == other.marked_parameter_ &&
           sizes_ == other.sizes_ && strides_ == other.strides_ && is_leaf_ == other.is_leaf_ &&
           has_grad_ == other.has_grad_ && no_hooks_ == other.no_hooks_ && keys_ == other.keys_;
  }

 private:
  bool gradient_matches(const at::Tensor& tensor) const {
    // What a tensor says of itself through several calls is read from its record at once.
    const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
    if (meta == nullptr) return !requires_grad_ && is_leaf_.value_or(true) && !has_grad_.value_or(false);
    // A view needs gradients once its base does; other tensors are asked without the virtual call.
    const bool requires_grad = meta->is_view_ ? meta->requires_grad() : meta->torch::autograd::AutogradMeta::requires_grad();
    if (requires_grad != requires_grad_) return false;
    if (is_leaf_ && (meta->is_view_ ? tensor.is_leaf() : meta->grad_fn_ == nullptr) != *is_leaf_) return false;
    return !has_grad_ || meta->grad_.defined() == *has_grad_;
  }

  static bool is_marked(PyObject* object) {
    Ref mark = Ref::steal(PyObject_GetAttrString(object, "_is_param"));
    int truth = mark ? PyObject_IsTrue(mark.get()) : 0;
    PyErr_Clear();
    return truth > 0;
  }

  Ref type_;
  at::ScalarType dtype_ = at::kFloat;
  caffe2::TypeMeta type_meta_;
  c10::Device device_ = c10::kCPU;
  bool requires_grad_ = false, marked_parameter_ = false, no_hooks_ = false;
  std::vector<int64_t> sizes_, strides_;
  std::optional<bool> is_leaf_, has_grad_;
  std::optional<uint64_t> keys_;
};

// Who else sees each operator of this thread: dispatch modes, function transforms, tracers. Nothing is compiled under
// them, and nothing compiled runs under them.
const c10::DispatchKeySet kWatchers({
    c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
    c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::Tracer});

// What a graph is traced with: a thread that implements an operator in Python has them off for its calls.
const c10::DispatchKeySet kTracing({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});

bool is_watched() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  if (!(keys.included_ & kWatchers).empty() || !(keys.excluded_ & kTracing).empty()) return true;
  if (at::impl::PythonTorchFunctionTLS::get_disabled_state() == at::impl::TorchFunctionDisabledState::ALL_DISABLED) {
    return true;
  }
  return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

// What decides between kernels where a program of operators is traced. The numbers are compared as they are.
struct KernelSwitch {
  const char* name;
  int64_t (*read)();
};

int64_t order_of_attentions() {
  int64_t digits = 0;
  for (at::SDPBackend backend : at::globalContext().sDPPriorityOrder()) digits = digits * 10 + static_cast<int>(backend) + 1;
  return digits;
}

// The thread's dispatch keys, but for those by which inference mode and autocast work, which are compared themselves.
int64_t keys_added() {
  return static_cast<int64_t>(
      c10::impl::tls_local_dispatch_key_set().included_.remove(c10::DispatchKey::ADInplaceOrView).raw_repr());
}

int64_t keys_taken() {
  c10::DispatchKeySet keys = c10::impl::tls_local_dispatch_key_set().excluded_ - c10::autocast_dispatch_keyset;
  if (c10::InferenceMode::is_enabled()) keys = keys - c10::autograd_dispatch_keyset;
  return static_cast<int64_t>(keys.raw_repr());
}

constexpr KernelSwitch kSwitches[] = {
    {"flash attention", [] { return static_cast<int64_t>(at::globalContext().userEnabledFlashSDP()); }},
    {"memory-efficient attention", [] { return static_cast<int64_t>(at::globalContext().userEnabledMemEfficientSDP()); }},
    {"math attention", [] { return static_cast<int64_t>(at::globalContext().userEnabledMathSDP()); }},
    {"cuDNN attention", [] { return static_cast<int64_t>(at::globalContext().userEnabledCuDNNSDP()); }},
    {"overrideable attention", [] { return static_cast<int64_t>(at::globalContext().userEnabledOverrideableSDP()); }},
    {"order of attentions", order_of_attentions},
    {"cuDNN", [] { return static_cast<int64_t>(at::globalContext().userEnabledCuDNN()); }},
    {"oneDNN", [] { return static_cast<int64_t>(at::globalContext().userEnabledMkldnn()); }},
    {"dispatch keys added", keys_added},
    {"dispatch keys taken", keys_taken},
    {"torch functions", [] { return static_cast<int64_t>(at::impl::PythonTorchFunctionTLS::get_disabled_state()); }},
};
constexpr size_t kSwitchCount = sizeof(kSwitches) / sizeof(kSwitches[0]);

class AmbientCheck final : public StateCheck {
 public:
  bool read(PyObject* record) {
    Ref dtype = field(record, "default_dtype");
    Ref modes = field(record, "torch_function_modes");
    Ref autocast = field(record, "autocast");
    if (!read_dtype(dtype.get(), &default_dtype_) || !modes || !autocast) return false;
    modes_ = PyLong_AsLongLong(modes.get());
    if (PyErr_Occurred()) return false;
    return read_bool(record, "grad_enabled", &grad_) && read_bool(record, "inference_mode", &inference_) &&
           read_bool(record, "autocast_cache", &cache_) && read_bool(record, "deterministic", &deterministic_) &&
           read_autocast(autocast.get()) && read_switches(record);
  }

  bool holds() const override {
    if (c10::GradMode::is_enabled() != grad_ || c10::InferenceMode::is_enabled() != inference_ ||
        at::autocast::is_autocast_cache_enabled() != cache_ || c10::get_default_dtype().toScalarType() != default_dtype_ ||
        at::globalContext().deterministicAlgorithms() != deterministic_ ||
        at::impl::PythonTorchFunctionTLS::stack_len() != modes_) {
      return false;
    }
    if (is_watched()) return false;
    for (size_t i = 0; i < kSwitchCount; i++) {
      if (kSwitches[i].read() != switches_[i]) return false;
    }
    for (const Autocast& entry : autocast_) {
      if (at::autocast::is_autocast_enabled(entry.device) != entry.enabled) return false;
      if (entry.enabled && at::autocast::get_autocast_dtype(entry.device) != entry.dtype) return false;
    }
    return true;
  }

 private:
  struct Autocast {
    c10::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };

  bool read_switches(PyObject* record) {
    Ref entries = field(record, "switches");
    if (!entries || !PyTuple_Check(entries.get()) || PyTuple_GET_SIZE(entries.get()) != kSwitchCount) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "GlobalState.switches: expected what kernel_switches() gives");
      return false;
    }
    for (size_t i = 0; i < kSwitchCount; i++) {
      const char* name = nullptr;
      long long value = 0;
      if (!PyArg_ParseTuple(PyTuple_GET_ITEM(entries.get(), static_cast<Py_ssize_t>(i)), "sL", &name, &value)) return false;
      switches_[i] = value;
    }
    return true;
  }

  bool read_autocast(PyObject* entries) {
    Ref items = Ref::steal(PySequence_Tuple(entries));
    if (!items) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); i++) {
      const char* device = nullptr;
      int enabled = 0;
      PyObject* dtype = nullptr;
      Autocast entry{};
      if (!PyArg_ParseTuple(PyTuple_GET_ITEM(items.get(), i), "spO", &device, &enabled, &dtype)) return false;
      if (!read_dtype(dtype, &entry.dtype)) return false;
      try {
        entry.device = c10::Device(std::string(device)).type();
      } catch (const std::exception& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
        return false;
      }
      entry.enabled = enabled != 0;
      autocast_.push_back(entry);
    }
    return true;
  }

  bool grad_ = true, inference_ = false, cache_ = true, deterministic_ = false;
  at::ScalarType default_dtype_ = at::kFloat;
  int64_t modes_ = 0;
  int64_t switches_[kSwitchCount] = {};
  std::vector<Autocast> autocast_;
};

// False: not a tensor whose elements lie at addresses.
bool memory_range(PyObject* object, MemoryRange* range) {
  *range = {0, 0, 0};
  if (!THPVariable_Check(object)) return false;
  const c10::TensorImpl* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
  if (impl->layout() != c10::kStrided) return false;
  if (impl->numel() == 0 || !impl->has_storage()) return true;
  const char* data = static_cast<const char*>(impl->storage().data());
  if (data == nullptr) return true;
  const int64_t itemsize = static_cast<int64_t>(impl->itemsize());
  uintptr_t low = reinterpret_cast<uintptr_t>(data + impl->storage_offset() * itemsize), high = low;
  c10::IntArrayRef sizes = impl->sizes(), strides = impl->strides();
  for (size_t dim = 0; dim < sizes.size(); dim++) {
    int64_t reach = (sizes[dim] - 1) * strides[dim] * itemsize;
    (reach < 0 ? low : high) += static_cast<uintptr_t>(reach);
  }
  c10::Device device = impl->device();
  *range = {(static_cast<int64_t>(device.type()) << 8) + device.index() + 1, low, high + static_cast<uintptr_t>(itemsize)};
  return true;
}

// Whether none of the first `written` ranges touches another: met in the order in which they begin, each has to begin
// behind the end of all those ahead of it that it must not touch.
bool apart(const std::vector<MemoryRange>& ranges, size_t written) {
  std::vector<size_t> order;
  order.reserve(ranges.size());
  for (size_t i = 0; i < ranges.size(); i++) {
    if (ranges[i].end != 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&ranges](size_t a, size_t b) {
    return std::tie(ranges[a].device, ranges[a].begin) < std::tie(ranges[b].device, ranges[b].begin);
  });
  int64_t device = -1;
  uintptr_t end = 0, written_end = 0;  // of the ranges so far on this device
  for (size_t i : order) {
    const MemoryRange& range = ranges[i];
    if (range.device != device) {
      device = range.device;
      end = written_end = 0;
    }
    if (range.begin < (i < written ? end : written_end)) return false;
    end = std::max(end, range.end);
    if (i < written) written_end = std::max(written_end, range.end);
  }
  return true;
}

}  // namespace

std::unique_ptr<TensorCheck> make_tensor_check(PyObject* record) {
  auto check = std::make_unique<MetadataCheck>();
  if (!check->read(record)) return nullptr;
  return check;
}

bool is_torch_constant(PyObject* object) {
  return THPDtype_Check(object) || THPDevice_Check(object) || THPLayout_Check(object) || THPMemoryFormat_Check(object) ||
         THPSize_Check(object);
}

TensorOf tensor_with_check(PyObject* object, const TensorCheck* check) {
  if (!THPVariable_Check(object)) return {object, check, {nullptr, nullptr}};
  const c10::TensorImpl* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
  return {object, check, {impl, impl->autograd_meta()}};
}

bool tensors_hold(const TensorOf* begin, const TensorOf* end) {
  constexpr int kAhead = 6;  // a net's tensors lie apart: their memory is asked for before it is needed
  for (const TensorOf* one = begin; one != end; one++) {
    if (end - one > kAhead) {
      const char* impl = static_cast<const char*>(one[kAhead].parts[0]);
      for (size_t offset = 0; offset < sizeof(c10::TensorImpl); offset += 64) __builtin_prefetch(impl + offset);
      __builtin_prefetch(one[kAhead].parts[1]);
      __builtin_prefetch(one[kAhead].object);
    }
    if (!static_cast<const MetadataCheck*>(one->check)->holds(one->object)) return false;
  }
  return true;
}

bool same_check(const TensorCheck& a, const TensorCheck& b) {
  return static_cast<const MetadataCheck&>(a).same_as(static_cast<const MetadataCheck&>(b));
}

std::unique_ptr<StateCheck> make_state_check(PyObject* record) {
  auto check = std::make_unique<AmbientCheck>();
  if (!check->read(record)) return nullptr;
  return check;
}

PyObject* gradient_hooks(PyObject*, PyObject* object) {
  if (!THPVariable_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "gradient_hooks: expected a tensor");
    return nullptr;
  }
  return PyBool_FromLong(has_gradient_hooks(THPVariable_Unpack(object)));
}

PyObject* kernel_switches(PyObject*, PyObject*) {
  Ref switches = Ref::steal(PyTuple_New(static_cast<Py_ssize_t>(kSwitchCount)));
  if (!switches) return nullptr;
  for (size_t i = 0; i < kSwitchCount; i++) {
    PyObject* entry = Py_BuildValue("(sL)", kSwitches[i].name, static_cast<long long>(kSwitches[i].read()));
    if (entry == nullptr) return nullptr;
    PyTuple_SET_ITEM(switches.get(), static_cast<Py_ssize_t>(i), entry);
  }
  return switches.release();
}

bool read_tensor_number(PyObject* object, TensorNumber which, int64_t dim, int64_t* out) {
  if (!THPVariable_Check(object)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  try {
    if (which == TensorNumber::offset) {
      *out = tensor.storage_offset();
      return true;
    }
    c10::IntArrayRef numbers = which == TensorNumber::size ? tensor.sizes() : tensor.strides();
    int64_t count = static_cast<int64_t>(numbers.size());
    if (dim < -count || dim >= count) return false;
    *out = numbers[dim < 0 ? dim + count : dim];
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

bool memory_is_disjoint(const std::vector<PyObject*>& tensors, size_t written, std::vector<MemoryRange>* known) {
  std::vector<MemoryRange> ranges(tensors.size());
  try {
    for (size_t i = 0; i < tensors.size(); i++) {
      if (!memory_range(tensors[i], &ranges[i])) return false;
    }
  } catch (const std::exception&) {
    return false;
  }
  if (ranges == *known) return true;
  if (!apart(ranges, written)) return false;
  *known = std::move(ranges);
  return true;
}

}  // namespace torchdynamo

#else  // built without torch: structural guards work, tensors cannot be guarded

namespace torchdynamo {

std::unique_ptr<TensorCheck> make_tensor_check(PyObject*) {
  PyErr_SetString(PyExc_NotImplementedError, "this build of torchdynamo._C has no torch: tensors cannot be guarded");
  return nullptr;
}

std::unique_ptr<StateCheck> make_state_check(PyObject*) {
  PyErr_SetString(PyExc_NotImplementedError, "this build of torchdynamo._C has no torch: no ambient state to guard");
  return nullptr;
}

PyObject* kernel_switches(PyObject*, PyObject*) { return PyTuple_New(0); }

PyObject* gradient_hooks(PyObject*, PyObject*) { return PyBool_FromLong(0); }

bool is_torch_constant(PyObject*) { return false; }

TensorOf tensor_with_check(PyObject* object, const TensorCheck* check) { return {object, check, {nullptr, nullptr}}; }

bool tensors_hold(const TensorOf* begin, const TensorOf* end) { return begin == end; }

bool same_check(const TensorCheck&, const TensorCheck&) { return false; }

bool read_tensor_number(PyObject*, TensorNumber, int64_t, int64_t*) { return false; }

bool memory_is_disjoint(const std::vector<PyObject*>&, size_t, std::vector<MemoryRange>*) { return false; }

}  // namespace torchdynamo

#endif

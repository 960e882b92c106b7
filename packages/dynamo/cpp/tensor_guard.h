// What guards ask of tensors and of torch's ambient state. The only part of the extension that needs torch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "refs.h"

namespace torchdynamo {

enum class TensorNumber { size, stride, offset };

// Metadata of a tensor, compared at once (a `schemas.TensorGuard`).
class TensorCheck {
 public:
  virtual ~TensorCheck() = default;
  virtual bool holds(PyObject* object) const = 0;
};

struct TensorOf {
  PyObject* object;  // borrowed
  const TensorCheck* check;
  const void* parts[2];  // where its metadata lay: fetched ahead, never trusted
};

TensorOf tensor_with_check(PyObject* object, const TensorCheck* check);

// A dtype, a device and the like: objects that never change.
bool is_torch_constant(PyObject* object);

bool tensors_hold(const TensorOf* begin, const TensorOf* end);
bool same_check(const TensorCheck& a, const TensorCheck& b);

// Ambient state, compared at once (a `schemas.GlobalState`).
class StateCheck {
 public:
  virtual ~StateCheck() = default;
  virtual bool holds() const = 0;
};

// Null with an exception set when the record is malformed, or when the extension was built without torch.
std::unique_ptr<TensorCheck> make_tensor_check(PyObject* record);
std::unique_ptr<StateCheck> make_state_check(PyObject* record);

// kernel_switches() -> ((name, number), ...): what a GlobalState holds of the choice between kernels.
PyObject* kernel_switches(PyObject*, PyObject*);

// gradient_hooks(tensor) -> bool: whether autograd's engine runs something of the program's where a gradient comes to it.
PyObject* gradient_hooks(PyObject*, PyObject* object);

// False when the object is not a tensor, or has no such dimension.
bool read_tensor_number(PyObject* object, TensorNumber which, int64_t dim, int64_t* out);

// The bytes between a strided tensor's first and last element; begin and end are 0 where there are none.
struct MemoryRange {
  int64_t device;
  uintptr_t begin, end;
  bool operator==(const MemoryRange& other) const {
    return device == other.device && begin == other.begin && end == other.end;
  }
};

// False when an object is not a strided tensor, or one of the first `written` overlaps another in memory. `known` holds
// the ranges that were last found to be apart.
bool memory_is_disjoint(const std::vector<PyObject*>& tensors, size_t written, std::vector<MemoryRange>* known);

}  // namespace torchdynamo

// The instruction loop. No Python object is touched here.
#include "program.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/empty_strided_ops.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace inductor {
namespace {

void evaluate(const Program& program, const std::vector<int32_t>& values, Frame& frame) {
  for (const int32_t value : values) {
    if (!program.values[value].evaluate(frame.symbols, &frame.values[value])) {
      throw std::runtime_error("a size is computed that Python would not: a division by zero, or a number of more than 64 bits");
    }
  }
}

// The list itself when it is all constants, else a patched copy in `buffer`.
c10::ArrayRef<int64_t> resolve(const Dims& dims, const int64_t* values, c10::SmallVectorImpl<int64_t>& buffer) {
  if (dims.patches.empty()) return dims.fixed;
  buffer.assign(dims.fixed.begin(), dims.fixed.end());
  for (const auto& [position, value] : dims.patches) buffer[position] = values[value];
  return buffer;
}

at::Tensor allocate(const Instruction& in, const int64_t* values) {
  c10::SmallVector<int64_t, 8> shape_buffer, stride_buffer;
  const auto shape = resolve(in.shape, values, shape_buffer);
  const auto strides = resolve(in.strides, values, stride_buffer);
  if (in.device.is_cpu()) {
    return at::Tensor(at::detail::empty_strided_cpu(shape, strides, in.dtype, /*pin_memory=*/false));
  }
  if (in.device.is_cuda()) return allocate_cuda(shape, strides, in.dtype, in.device);
  return at::empty_strided(shape, strides, at::TensorOptions().dtype(in.dtype).device(in.device));
}

// Another tensor over the same storage; `offset` counts elements of the new dtype from the source's first element.
at::Tensor view(const Instruction& in, const at::Tensor& src, const int64_t* values) {
  c10::SmallVector<int64_t, 8> shape_buffer, stride_buffer, offset_buffer;
  const auto dtype = in.dtype == c10::ScalarType::Undefined ? src.dtype() : c10::scalarTypeToTypeMeta(in.dtype);
  at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(src.storage()), src.key_set(), dtype);
  c10::TensorImpl* impl = out.unsafeGetTensorImpl();
  const int64_t start = src.storage_offset() * static_cast<int64_t>(src.itemsize()) / static_cast<int64_t>(dtype.itemsize());
  impl->set_sizes_and_strides(
      resolve(in.shape, values, shape_buffer), resolve(in.strides, values, stride_buffer),
      start + resolve(in.offset, values, offset_buffer)[0]);
  return out;
}

// The memory of an input that the caller gave away, or new memory. An input to be claimed is an alias that only the frame
// has, so that its storage counts whoever holds the caller's tensor, a view of it, or the storage.
at::Tensor claim(const Instruction& in, const at::Tensor& src, const int64_t* values) {
  if (!src.defined() || src.unsafeGetTensorImpl()->is_python_dispatch() || !src.has_storage()) return allocate(in, values);
  const c10::Storage& storage = src.storage();
  // What numpy, a file or another library lends cannot be resized, and is seen by others.
  if (storage.use_count() != 1 || !storage.resizable() || storage.data() == nullptr) return allocate(in, values);
  at::Tensor found = view(in, src, values);
  const size_t end = at::detail::computeStorageNbytes(
      found.sizes(), found.strides(), found.itemsize(), static_cast<size_t>(found.storage_offset()));
  return end <= storage.nbytes() ? found : allocate(in, values);
}

// `ops.Fault`: what a kernel's result says.
constexpr int index_fault = 1, division_fault = 2;

// Where a kernel finds a tensor's elements.
void* address_of(const at::Tensor& tensor) {
  void* address = const_cast<void*>(tensor.unsafeGetTensorImpl()->data());
  TORCH_CHECK(
      address != nullptr || tensor.numel() == 0, "a tensor of sizes ", tensor.sizes(),
      " that a kernel reads or writes has no memory: its storage was given back, as by resize_(0), or never made");
  return address;
}

void call_kernel(const Instruction& in, const Frame& frame) {
  c10::SmallVector<void*, 32> pointers;
  c10::SmallVector<int64_t, 16> symbols;
  for (const int32_t slot : in.buffers) pointers.push_back(address_of(frame.slots[slot]));
  const int met = in.kernel(pointers.data(), resolve(in.shape, frame.values, symbols).data());
  if (met == 0) return;
  TORCH_CHECK_INDEX(!(met & index_fault), "index out of bounds: an index tensor holds a value outside the dimension that it indexes");
  TORCH_CHECK(!(met & division_fault), "ZeroDivisionError: an integer is divided by zero");
}

void call_triton(const Instruction& in, const Frame& frame) {
  c10::SmallVector<int64_t, 32> cells;
  c10::SmallVector<int64_t, 16> symbols;
  c10::SmallVector<int64_t, 3> grid;
  c10::SmallVector<at::Tensor, 2> aligned_copies;  // freed in stream order
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2> written_back;
  const std::string& parameters = in.triton->parameters();
  for (size_t i = 0; i < in.buffers.size(); ++i) {
    const at::Tensor& tensor = frame.slots[in.buffers[i]];
    auto address = reinterpret_cast<int64_t>(address_of(tensor));
    if (parameters[i] == static_cast<char>(TritonKernel::Parameter::Aligned) && (address & 15) != 0) {
      at::Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
      copy.copy_(tensor);
      address = reinterpret_cast<int64_t>(copy.unsafeGetTensorImpl()->data());
      if (std::find(in.written.begin(), in.written.end(), static_cast<int32_t>(i)) != in.written.end()) {
        written_back.emplace_back(tensor, copy);  // an input that its result replaces
      }
      aligned_copies.push_back(std::move(copy));
    }
    cells.push_back(address);
  }
  const auto resolved = resolve(in.shape, frame.values, symbols);
  cells.append(resolved.begin(), resolved.end());
  in.triton->launch(in.device.index(), frame.stream, resolve(in.strides, frame.values, grid).data(), cells.data());
  for (auto& [tensor, copy] : written_back) tensor.copy_(copy);
}

void call_python(const Instruction& in, Frame& frame) {
  std::vector<at::Tensor> tensors;
  c10::SmallVector<int64_t, 8> integers;
  for (const int32_t slot : in.buffers) tensors.push_back(frame.slots[slot]);
  std::vector<at::Tensor> results = in.python(tensors, resolve(in.shape, frame.values, integers));
  TORCH_CHECK(results.size() >= in.destinations.size(), "returned ", results.size(), " tensors, not ", in.destinations.size());
  for (size_t i = 0; i < in.destinations.size(); ++i) {
    if (in.destinations[i].kind == Destination::Kind::Slot) frame.slots[in.destinations[i].index] = std::move(results[i]);
  }
}

// An operator's result in the strides that its readers were compiled for; an undefined one stays so.
void expect(const Instruction& in, Frame& frame) {
  at::Tensor& result = frame.slots[in.src];
  if (!result.defined()) return;
  c10::SmallVector<int64_t, 8> shape_buffer, stride_buffer;
  const auto shape = resolve(in.shape, frame.values, shape_buffer);
  const auto strides = resolve(in.strides, frame.values, stride_buffer);
  TORCH_CHECK(result.sizes() == shape, "returned a tensor of sizes ", result.sizes(), ", not ", shape);
  const auto found = result.strides();
  bool same = true;
  for (size_t i = 0; i < shape.size(); ++i) same &= found[i] == strides[i] || shape[i] == 1;
  if (same || result.numel() == 0) return;
  frame.mended.emplace_back(&in, c10::str("returned strides ", found, " where ", strides, " were expected"));
  const at::Tensor copy = at::empty_strided(shape, strides, result.options());
  copy.copy_(result);
  result = copy;
}

// A number as symbols hold it: a float by its 64 bits.
int64_t bits_of(const at::Scalar& number) {
  if (!number.isFloatingPoint()) return number.toLong();
  const double value = number.toDouble();
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

void step(const Program& program, const Instruction& in, Frame& frame) {
  switch (in.opcode) {
    case Opcode::Alloc:
      frame.slots[in.dst] = allocate(in, frame.values);
      break;
    case Opcode::Free:
      frame.slots[in.src].reset();
      break;
    case Opcode::View:
      frame.slots[in.dst] = view(in, frame.slots[in.src], frame.values);
      break;
    case Opcode::Claim:
      frame.slots[in.dst] = claim(in, frame.slots[in.src], frame.values);
      break;
    case Opcode::Kernel:
      call_kernel(in, frame);
      break;
    case Opcode::Triton:
      call_triton(in, frame);
      break;
    case Opcode::Aten:
      run_aten(in, frame);
      break;
    case Opcode::Python:
      call_python(in, frame);
      break;
    case Opcode::ReadScalar:
      frame.symbols[in.dst] = bits_of(at::_local_scalar_dense(frame.slots[in.src]));
      break;
    case Opcode::Require:
      TORCH_CHECK(frame.values[in.src], in.why);
      break;
    case Opcode::Expect:
      expect(in, frame);
      break;
  }
  if (in.opcode == Opcode::Aten || in.opcode == Opcode::ReadScalar) {
    evaluate(program, in.refreshed, frame);
  }
}

// A step that profilers see under its label, where any are on; where none are, a look at that is all it costs.
void seen_step(const Program& program, const Instruction& in, Frame& frame) {
  auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (!observers) return step(program, in, frame);
  at::RecordFunction seen(std::move(*observers));
  seen.before(at::RecordFunction::FunctionDescriptor(std::string_view(in.label)));
  step(program, in, frame);
}

std::string describe(const Program& program, size_t position) {
  const Instruction& in = program.instructions[position];
  return "while running instruction " + std::to_string(position) + " of the compiled program: " + in.name;
}

}  // namespace

at::Tensor alias_of(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.unsafeGetTensorImpl()->is_python_dispatch()) return tensor;
  at::Tensor out =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return out;
}

// Straight to the device's kernel: no backend is left to select.
at::Tensor allocate_cuda(c10::IntArrayRef shape, c10::IntArrayRef strides, c10::ScalarType dtype, c10::Device device) {
  constexpr c10::DispatchKeySet cuda(c10::DispatchKey::CUDA);
  return at::_ops::empty_strided::redispatch(
      cuda, c10::fromIntArrayRefSlow(shape), c10::fromIntArrayRefSlow(strides), dtype, c10::kStrided, device, std::nullopt);
}

void run(const Program& program, Frame& frame) {
  // The graph holds what autograd and autocast would have added, so their keys must not act again.
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  c10::OptionalDeviceGuard device_guard;
  if (!program.device.is_cpu()) device_guard.reset_device(program.device);
  evaluate(program, program.initial_values, frame);
  size_t position = 0;
  try {
    for (const size_t end = program.instructions.size(); position < end; ++position) {
      const Instruction& in = program.instructions[position];
      in.label.empty() ? step(program, in, frame) : seen_step(program, in, frame);
    }
  } catch (c10::Error& error) {
    error.add_context(describe(program, position));
    throw;
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "\n" + describe(program, position));
  }
}

}  // namespace inductor

// The instruction loop. No Python object is touched here.
#include "program.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/empty_strided_ops.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace inductor {
namespace {

int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0) throw std::runtime_error("a size expression divides by zero");
  const int64_t q = a / b;
  return q - ((a % b != 0) && ((a < 0) != (b < 0)));
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
  if (in.device.is_cuda()) {  // straight to the device's kernel: no backend is left to select
    constexpr c10::DispatchKeySet cuda(c10::DispatchKey::CUDA);
    return at::_ops::empty_strided::redispatch(
        cuda, c10::fromIntArrayRefSlow(shape), c10::fromIntArrayRefSlow(strides), in.dtype, c10::kStrided, in.device, std::nullopt);
  }
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

// `ops.Fault`: what a kernel's result says.
constexpr int index_fault = 1, division_fault = 2;

void call_kernel(const Instruction& in, const Frame& frame) {
  c10::SmallVector<void*, 32> pointers;
  c10::SmallVector<int64_t, 16> symbols;
  for (const int32_t slot : in.buffers) pointers.push_back(const_cast<void*>(frame.slots[slot].unsafeGetTensorImpl()->data()));
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
  const std::string& parameters = in.triton->parameters();
  for (size_t i = 0; i < in.buffers.size(); ++i) {
    const at::Tensor& tensor = frame.slots[in.buffers[i]];
    auto address = reinterpret_cast<int64_t>(tensor.unsafeGetTensorImpl()->data());
    if (parameters[i] == static_cast<char>(TritonKernel::Parameter::Aligned) && (address & 15) != 0) {
      if (std::find(in.written.begin(), in.written.end(), static_cast<int32_t>(i)) != in.written.end()) {
        throw std::runtime_error("buffer " + std::to_string(i) + " is written, but does not start at a multiple of 16 bytes");
      }
      at::Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
      copy.copy_(tensor);
      address = reinterpret_cast<int64_t>(copy.unsafeGetTensorImpl()->data());
      aligned_copies.push_back(std::move(copy));
    }
    cells.push_back(address);
  }
  const auto resolved = resolve(in.shape, frame.values, symbols);
  cells.append(resolved.begin(), resolved.end());
  in.triton->launch(in.device.index(), frame.stream, resolve(in.strides, frame.values, grid).data(), cells.data());
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
      frame.symbols[in.dst] = at::_local_scalar_dense(frame.slots[in.src]).toLong();
      break;
    case Opcode::Expect:
      expect(in, frame);
      break;
  }
  if (in.opcode == Opcode::Aten || in.opcode == Opcode::ReadScalar) {
    for (const int32_t value : in.refreshed) frame.values[value] = evaluate(program.values[value], frame.symbols);
  }
}

std::string describe(const Program& program, size_t position) {
  const Instruction& in = program.instructions[position];
  return "while running instruction " + std::to_string(position) + " of the compiled program: " + in.name;
}

}  // namespace

double as_float(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

int64_t as_bits(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

namespace {

// Python's float `%`, whose result has the sign of the divisor.
double float_mod(double a, double b) {
  const double rest = std::fmod(a, b);
  if (rest == 0.0) return std::copysign(0.0, b);
  return (b < 0) != (rest < 0) ? rest + b : rest;
}

int64_t integer_power(int64_t a, int64_t b) {
  int64_t result = 1;
  for (; b > 0; b >>= 1, a *= a) {
    if ((b & 1) != 0) result *= a;
  }
  return result;
}

double one_float(SizeOp op, double a) {
  switch (op) {
    case SizeOp::Fneg: return -a;
    case SizeOp::Fabs: return std::fabs(a);
    case SizeOp::Sqrt: return std::sqrt(a);
    case SizeOp::Exp: return std::exp(a);
    case SizeOp::Expm1: return std::expm1(a);
    case SizeOp::Log: return std::log(a);
    case SizeOp::Log1p: return std::log1p(a);
    case SizeOp::Log2: return std::log2(a);
    case SizeOp::Log10: return std::log10(a);
    case SizeOp::Sin: return std::sin(a);
    case SizeOp::Cos: return std::cos(a);
    case SizeOp::Tan: return std::tan(a);
    case SizeOp::Tanh: return std::tanh(a);
    default: return std::atan(a);
  }
}

double two_floats(SizeOp op, double a, double b) {
  switch (op) {
    case SizeOp::Fadd: return a + b;
    case SizeOp::Fsub: return a - b;
    case SizeOp::Fmul: return a * b;
    case SizeOp::Fdiv: return a / b;
    case SizeOp::Fmod: return float_mod(a, b);
    case SizeOp::FfloorDiv: return std::floor((a - float_mod(a, b)) / b + 0.5);
    case SizeOp::Fpow: return std::pow(a, b);
    case SizeOp::Fmin: return b < a ? b : a;
    default: return b > a ? b : a;
  }
}

// A step of one operand, or false.
bool apply_one(SizeOp op, int64_t& a) {
  switch (op) {
    case SizeOp::Neg: a = -a; return true;
    case SizeOp::ToFloat: a = as_bits(static_cast<double>(a)); return true;
    case SizeOp::Trunc: a = static_cast<int64_t>(as_float(a)); return true;
    case SizeOp::Floor: a = static_cast<int64_t>(std::floor(as_float(a))); return true;
    case SizeOp::Ceil: a = static_cast<int64_t>(std::ceil(as_float(a))); return true;
    case SizeOp::Round: a = static_cast<int64_t>(std::nearbyint(as_float(a))); return true;
    default:
      if (op < SizeOp::Fneg) return false;
      a = as_bits(one_float(op, as_float(a)));
      return true;
  }
}

}  // namespace

int64_t evaluate(const SizeProgram& program, const int64_t* symbols) {
  c10::SmallVector<int64_t, 16> stack;
  for (const SizeStep& s : program) {
    if (s.op == SizeOp::Const) {
      stack.push_back(s.operand);
    } else if (s.op == SizeOp::Symbol) {
      stack.push_back(symbols[s.operand]);
    } else if (!apply_one(s.op, stack.back())) {
      const int64_t b = stack.pop_back_val();
      int64_t& a = stack.back();
      switch (s.op) {
        case SizeOp::Add: a += b; break;
        case SizeOp::Sub: a -= b; break;
        case SizeOp::Mul: a *= b; break;
        case SizeOp::FloorDiv: a = floor_divide(a, b); break;
        case SizeOp::Mod: a -= floor_divide(a, b) * b; break;
        case SizeOp::Min: a = std::min(a, b); break;
        case SizeOp::Max: a = std::max(a, b); break;
        case SizeOp::BitAnd: a &= b; break;
        case SizeOp::BitOr: a |= b; break;
        case SizeOp::BitXor: a ^= b; break;
        case SizeOp::Lshift: a <<= b; break;
        case SizeOp::Rshift: a >>= b; break;
        case SizeOp::Ipow: a = integer_power(a, b); break;
        case SizeOp::Idiv: a = as_bits(static_cast<double>(a) / static_cast<double>(b)); break;
        default: a = as_bits(two_floats(s.op, as_float(a), as_float(b))); break;
      }
    }
  }
  return stack.back();
}

void run(const Program& program, Frame& frame) {
  // The graph holds what autograd and autocast would have added, so their keys must not act again.
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  c10::OptionalDeviceGuard device_guard;
  if (!program.device.is_cpu()) device_guard.reset_device(program.device);
  for (const int32_t value : program.initial_values) frame.values[value] = evaluate(program.values[value], frame.symbols);
  size_t position = 0;
  try {
    for (const size_t end = program.instructions.size(); position < end; ++position) {
      step(program, program.instructions[position], frame);
    }
  } catch (c10::Error& error) {
    error.add_context(describe(program, position));
    throw;
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "\n" + describe(program, position));
  }
}

}  // namespace inductor

#include "builder.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <stdexcept>

namespace inductor {
namespace {

Dims dims_of(const Sizes& sizes) {
  Dims dims;
  for (const auto& [is_value, number] : sizes) {
    if (is_value) dims.patches.emplace_back(static_cast<int32_t>(dims.fixed.size()), static_cast<int32_t>(number));
    dims.fixed.push_back(is_value ? 0 : number);
  }
  return dims;
}

c10::IValue fixed_value(const c10::IValue& given, const c10::Type& type);

c10::IValue fixed_list(const std::vector<c10::IValue>& items, const c10::Type& element) {
  const auto fill = [&](auto list, auto cast) {
    for (const c10::IValue& item : items) list.push_back(cast(fixed_value(item, element)));
    return c10::IValue(std::move(list));
  };
  switch (element.kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return fill(c10::List<int64_t>(), [](const c10::IValue& v) { return v.isBool() ? v.toBool() : v.toInt(); });
    case c10::TypeKind::FloatType:
      return fill(c10::List<double>(), [](const c10::IValue& v) { return v.toDouble(); });
    case c10::TypeKind::BoolType:
      return fill(c10::List<bool>(), [](const c10::IValue& v) { return v.toBool(); });
    case c10::TypeKind::StringType:
      return fill(c10::List<std::string>(), [](const c10::IValue& v) { return v.toStringRef(); });
    case c10::TypeKind::NumberType:
      return fill(c10::List<at::Scalar>(), [](const c10::IValue& v) { return v.toScalar(); });
    case c10::TypeKind::TensorType:  // of tensors there are slots: this one is empty
      return fill(c10::List<at::Tensor>(), [](const c10::IValue& v) { return v.toTensor(); });
    default:
      throw std::invalid_argument("an ATen argument of type List[" + element.str() + "] cannot be prepared");
  }
}

// A value as it comes in the form that a type of a schema asks for.
c10::IValue fixed_value(const c10::IValue& given, const c10::Type& type) {
  if (given.isNone()) {
    // A mandatory Tensor that is None is an undefined one: what ATen's attention kernels return for parts they lack.
    if (type.kind() == c10::TypeKind::TensorType) return at::Tensor();
    return {};
  }
  if (const auto* optional = type.castRaw<c10::OptionalType>()) return fixed_value(given, *optional->getElementType());
  if (const auto* list = type.castRaw<c10::ListType>()) {
    if (given.isTuple()) return fixed_list(given.toTupleRef().elements().vec(), *list->getElementType());
    return fixed_value(given, *list->getElementType());  // int[2] accepts a single int; the kernel broadcasts it
  }
  if (given.isInt() && type.kind() == c10::TypeKind::FloatType) return static_cast<double>(given.toInt());
  if (given.isTuple()) throw std::invalid_argument("an ATen argument of type " + type.str() + " cannot be prepared from a list");
  return given;
}

Argument argument_of(const Argument& given, const c10::Type& type) {
  Argument argument = given;
  if (given.kind == Argument::Kind::Fixed) argument.fixed = fixed_value(given.fixed, type);
  if (given.kind != Argument::Kind::List) return argument;
  const auto* unwrapped = &type;
  if (const auto* optional = type.castRaw<c10::OptionalType>()) unwrapped = optional->getElementType().get();
  const auto& element = *unwrapped->expectRef<c10::ListType>().getElementType();
  const bool tensors = element.kind() == c10::TypeKind::TensorType;
  const bool optional_tensors = element.kind() == c10::TypeKind::OptionalType;
  argument.kind = tensors ? Argument::Kind::Tensors
      : optional_tensors  ? Argument::Kind::OptionalTensors
      : element.kind() == c10::TypeKind::NumberType ? Argument::Kind::Numbers
                          : Argument::Kind::Integers;
  for (Argument& item : argument.items) item = argument_of(item, element);
  return argument;
}

}  // namespace

Instruction& Builder::add(Opcode opcode, std::string name) {
  program_->instructions.push_back(Instruction{.opcode = opcode});
  program_->instructions.back().name = std::move(name);
  return program_->instructions.back();
}

void Builder::uses(c10::Device device) {
  if (!device.is_cpu()) program_->device = device;
}

void Builder::input_tensor(std::string name, int32_t slot, c10::ScalarType dtype, c10::Device device, int64_t dim) {
  program_->inputs.push_back({false, slot, dtype, device, dim, std::move(name)});
  uses(device);
}

void Builder::input_symbol(std::string name, int32_t symbol) {
  Input input;
  input.is_symbol = true;
  input.index = symbol;
  input.name = std::move(name);
  program_->inputs.push_back(std::move(input));
}

int64_t Builder::value(const std::vector<std::pair<std::string, int64_t>>& steps, bool initial) {
  SizeProgram sizes;
  for (const auto& [name, argument] : steps) {
    const auto op = primtorch::size_program::operation(name);
    if (!op || !sizes.push(*op, argument)) throw std::invalid_argument("not a size program: " + name);
  }
  if (!sizes.leaves_one_value()) throw std::invalid_argument("not a size program: it does not leave one value");
  program_->values.push_back(std::move(sizes));
  const auto index = static_cast<int64_t>(program_->values.size()) - 1;
  if (initial) program_->initial_values.push_back(static_cast<int32_t>(index));
  return index;
}

void Builder::alloc(int32_t dst, const Sizes& shape, const Sizes& strides, c10::ScalarType dtype, c10::Device device,
                    std::string name) {
  Instruction& in = add(Opcode::Alloc, std::move(name));
  in.dst = dst;
  in.shape = dims_of(shape);
  in.strides = dims_of(strides);
  in.dtype = dtype;
  in.device = device;
  uses(device);
}

void Builder::view(int32_t dst, int32_t src, const Sizes& shape, const Sizes& strides, const Size& offset, c10::ScalarType dtype,
                   std::string name) {
  Instruction& in = add(Opcode::View, std::move(name));
  in.dst = dst;
  in.src = src;
  in.shape = dims_of(shape);
  in.strides = dims_of(strides);
  in.offset = dims_of({offset});
  in.dtype = dtype;
}

void Builder::claim(int32_t dst, int32_t src, const Sizes& shape, const Sizes& strides, c10::ScalarType dtype, c10::Device device,
                    std::string name) {
  const auto given = std::find_if(program_->inputs.begin(), program_->inputs.end(), [src](const Input& input) {
    return !input.is_symbol && input.index == src;
  });
  if (given == program_->inputs.end()) throw std::invalid_argument(name + ": nobody but the program holds what is no input");
  given->claimed = true;
  alloc(dst, shape, strides, dtype, device, std::move(name));
  Instruction& in = program_->instructions.back();
  in.opcode = Opcode::Claim;
  in.src = src;
  in.offset = dims_of({{false, 0}});
}

void Builder::kernel(KernelFunction function, std::vector<int32_t> buffers, const Sizes& symbols, std::string name) {
  Instruction& in = add(Opcode::Kernel, std::move(name));
  in.kernel = function;
  in.buffers = std::move(buffers);
  in.shape = dims_of(symbols);
}

void Builder::triton(std::shared_ptr<TritonKernel> handle, const Sizes& grid, std::vector<int32_t> buffers,
                     std::vector<int32_t> written, const Sizes& symbols, c10::Device device, std::string name) {
  if (handle->parameters().size() != buffers.size() + symbols.size()) {
    throw std::invalid_argument(name + " takes " + std::to_string(handle->parameters().size()) + " arguments, not " +
                                std::to_string(buffers.size() + symbols.size()));
  }
  Instruction& in = add(Opcode::Triton, std::move(name));
  in.triton = std::move(handle);
  in.buffers = std::move(buffers);
  in.written = std::move(written);
  in.shape = dims_of(symbols);
  in.strides = dims_of(grid);
  in.device = device;
  uses(device);
}

void Builder::aten(const std::string& op, const std::string& overload, const std::vector<Argument>& given,
                   std::vector<Destination> destinations, std::vector<int32_t> refreshed, std::string name) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), overload.c_str());
  const auto& schema = handle.schema().arguments();
  if (given.size() != schema.size()) {
    throw std::invalid_argument(op + " takes " + std::to_string(schema.size()) + " arguments, not " + std::to_string(given.size()));
  }
  Instruction& in = add(Opcode::Aten, std::move(name));
  in.op = std::make_shared<c10::OperatorHandle>(handle);
  in.foreign = op.rfind("aten::", 0) != 0 && !handle.schema().is_mutable();
  for (size_t i = 0; i < given.size(); ++i) in.arguments.push_back(argument_of(given[i], *schema[i].type()));
  in.destinations = std::move(destinations);
  in.refreshed = std::move(refreshed);
  const bool kept = in.destinations.size() == 1 && in.destinations[0].kind == Destination::Kind::Slot;
  if (overload.empty() && kept) in.product = CudaProduct::of(op, in.arguments);
  if (in.product && choices_) in.product->tune(choices_);
}

void Builder::python(PythonCall call, std::vector<int32_t> slots, const Sizes& integers, std::vector<Destination> destinations,
                     std::string name) {
  Instruction& in = add(Opcode::Python, std::move(name));
  in.python = std::move(call);
  in.buffers = std::move(slots);
  in.shape = dims_of(integers);
  in.destinations = std::move(destinations);
}

void Builder::read_scalar(int32_t symbol, int32_t src, std::vector<int32_t> refreshed, std::string name) {
  Instruction& in = add(Opcode::ReadScalar, std::move(name));
  in.dst = symbol;
  in.src = src;
  in.refreshed = std::move(refreshed);
}

void Builder::require(int32_t value, std::string name, std::string why) {
  Instruction& in = add(Opcode::Require, std::move(name));
  in.src = value;
  in.why = std::move(why);
}

void Builder::expect(int32_t slot, const Sizes& shape, const Sizes& strides, std::string source,
                     std::function<void(const std::string&)> mended) {
  Instruction& in = add(Opcode::Expect, std::move(source));
  in.mended = std::move(mended);
  in.src = slot;
  in.shape = dims_of(shape);
  in.strides = dims_of(strides);
}

void Builder::output_size(const Size& size) {
  output({size.first ? Output::Kind::Value : Output::Kind::Integer, size.second});
}

std::shared_ptr<Program> Builder::build(int32_t slots, int32_t symbols) {
  program_->slots = slots;
  program_->symbols = symbols;
  return std::exchange(program_, std::make_shared<Program>());
}

}  // namespace inductor

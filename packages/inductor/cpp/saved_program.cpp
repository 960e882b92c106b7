// `torchinductor::Program`: a call from C++, checked, bound to the program's slots and symbols, run, and put together.
#include <ATen/core/ivalue_inl.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
#include <torchinductor/program.h>

#include <utility>

#include "program_file.h"

namespace torchinductor {

using inductor::Call;
using inductor::Measure;
using inductor::Result;
using Values = std::vector<c10::IValue>;
using Numbers = c10::SmallVector<int64_t, 16>;

struct Program::State {
  inductor::ProgramFile file;
};

namespace {

std::string named(const Input& input, size_t place) { return "input " + std::to_string(place) + " (" + input.name + ")"; }

uintptr_t begin_of(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()); }

// Elements from the first to the last of a tensor that is not empty.
int64_t reach_of(const at::Tensor& tensor) {
  int64_t reach = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) reach += (tensor.size(dim) - 1) * tensor.stride(dim);
  return reach;
}

uintptr_t end_of(const at::Tensor& tensor) { return begin_of(tensor) + reach_of(tensor) * tensor.itemsize(); }

// Whether the memory that a tensor's metadata speaks of is there: it may have been given back, or never been made.
bool has_its_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const size_t end = (tensor.storage_offset() + reach_of(tensor)) * tensor.itemsize();
  return !tensor._is_zerotensor() && begin_of(tensor) != 0 && end <= tensor.storage().nbytes();
}

// What differs between a tensor and what the program was compiled for; nothing where they fit.
std::string difference(const at::Tensor& tensor, const Input& want) {
  if (!tensor.defined()) return "is an undefined tensor";
  if (want.dtype == c10::ScalarType::Undefined) return {};
  if (tensor.scalar_type() != want.dtype) return c10::str("is of dtype ", tensor.scalar_type(), ", expected ", want.dtype);
  if (!tensor.device().is_cpu()) return c10::str("is on ", tensor.device(), ", expected cpu");
  if (tensor.layout() != c10::kStrided) return c10::str("is of layout ", tensor.layout(), ", expected Strided");
  if (tensor.is_conj() || tensor.is_neg()) return "is conjugated or negated lazily: call resolve_conj() and resolve_neg()";
  const auto rank = static_cast<int64_t>(want.sizes.size());
  if (tensor.dim() != rank) return c10::str("has ", tensor.dim(), " dimensions, expected ", rank);
  for (int64_t dim = 0; dim < rank; ++dim) {
    if (want.sizes[dim] >= 0 && tensor.size(dim) != want.sizes[dim]) {
      return c10::str("has size ", tensor.size(dim), " at dim ", dim, ", expected ", want.sizes[dim]);
    }
  }
  for (int64_t dim = 0; dim < rank; ++dim) {
    if (want.strides[dim] >= 0 && tensor.stride(dim) != want.strides[dim]) {
      return c10::str("has stride ", tensor.stride(dim), " at dim ", dim, ", expected ", want.strides[dim]);
    }
  }
  if (!has_its_memory(tensor)) return "has no memory, or less than its sizes and strides say";
  const size_t alignment = std::min<size_t>(tensor.itemsize(), alignof(double));
  if (tensor.numel() > 0 && begin_of(tensor) % alignment != 0) return c10::str("lies at an address that is no multiple of ", alignment);
  return {};
}

void check_inputs(const Call& call, const Values& values) {
  if (values.size() != call.inputs.size()) {
    throw InputError(c10::str("the program takes ", call.inputs.size(), " inputs, not ", values.size()));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const Input& want = call.inputs[i];
    const bool fits = want.kind == Input::Kind::Tensor ? values[i].isTensor()
        : want.kind == Input::Kind::Integer            ? values[i].isInt()
                                                       : values[i].isDouble();
    constexpr const char* kinds[] = {"a tensor", "an integer", "a float"};
    if (!fits) throw InputError(named(want, i) + " is a " + values[i].tagKind() + ", expected " + kinds[static_cast<int>(want.kind)]);
    const std::string found = values[i].isTensor() ? difference(values[i].toTensor(), want) : "";
    if (!found.empty()) throw InputError(named(want, i) + " " + found);
  }
}

// Holds for tensors that were checked.
Numbers measured(const Call& call, const Values& values) {
  Numbers numbers;
  for (const Measure& measure : call.measures) {
    const c10::IValue& value = values[measure.input];
    switch (measure.kind) {
      case Measure::Kind::Size: numbers.push_back(value.toTensor().size(measure.dim)); break;
      case Measure::Kind::Stride: numbers.push_back(value.toTensor().stride(measure.dim)); break;
      case Measure::Kind::Offset: numbers.push_back(value.toTensor().storage_offset()); break;
      case Measure::Kind::Number: numbers.push_back(value.isInt() ? value.toInt() : inductor::float_bits(value.toDouble())); break;
    }
  }
  return numbers;
}

void check_relations(const Call& call, const Values& values, const Numbers& numbers) {
  for (const auto& relation : call.relations) {
    int64_t holds = 0;
    if (!relation.holds.evaluate(numbers.data(), &holds) || holds == 0) throw InputError(relation.text + " does not hold");
  }
  const auto refuse = [&](const std::pair<int32_t, int32_t>& pair, const char* how) {
    throw InputError(named(call.inputs[pair.first], pair.first) + " and " + named(call.inputs[pair.second], pair.second) + how);
  };
  const auto are_one = [&](const std::pair<int32_t, int32_t>& pair) {
    const auto &a = values[pair.first], &b = values[pair.second];
    return a.isTensor() && b.isTensor() && a.toTensor().is_same(b.toTensor());
  };
  for (const auto& pair : call.same) {
    if (!are_one(pair)) refuse(pair, " are two tensors, expected the same one");
  }
  for (const auto& pair : call.different) {
    if (are_one(pair)) refuse(pair, " are one tensor, expected two");
  }
  for (const auto& pair : call.apart) {
    const auto &a = values[pair.first].toTensor(), &b = values[pair.second].toTensor();
    if (a.numel() > 0 && b.numel() > 0 && begin_of(a) < end_of(b) && begin_of(b) < end_of(a)) {
      refuse(pair, " share memory that the program writes to");
    }
  }
}

int64_t evaluated(const inductor::SizeProgram& program, const Numbers& numbers) {
  int64_t value = 0;
  if (!program.evaluate(numbers.data(), &value)) {
    throw std::runtime_error("a size is computed that Python would not: a division by zero, or a number of more than 64 bits");
  }
  return value;
}

c10::IValue output_value(const inductor::Output& output, const inductor::Frame& frame) {
  using Kind = inductor::Output::Kind;
  switch (output.kind) {
    case Kind::Slot: return frame.slots[output.index].defined() ? c10::IValue(frame.slots[output.index]) : c10::IValue();
    case Kind::Value: return frame.values[output.index];
    case Kind::FloatValue: return inductor::bits_float(frame.values[output.index]);
    case Kind::Integer: return output.index;
    case Kind::Float: return output.number;
    case Kind::None: break;
  }
  return {};
}

// The outputs of the program, for the inputs of a call.
Values run_program(const inductor::ProgramFile& file, const Values& values, const Numbers& numbers) {
  const inductor::Program& program = *file.program;
  c10::SmallVector<at::Tensor, 64> slots(program.slots);
  c10::SmallVector<int64_t, 16> symbols(program.symbols, 0);
  c10::SmallVector<int64_t, 32> sizes(program.values.size(), 0);
  inductor::Frame frame{slots.data(), symbols.data(), sizes.data()};
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    const auto& feed = file.call.feeds[i];
    const int32_t index = program.inputs[i].index;
    if (!program.inputs[i].is_symbol) slots[index] = values[feed.input].toTensor();
    else if (index >= 0) symbols[index] = evaluated(feed.number, numbers);
  }
  for (const auto& [slot, tensor] : program.constants) slots[slot] = tensor;
  inductor::run(program, frame);
  for (const auto& [instruction, text] : frame.mended) instruction->mended(text);
  Values outputs;
  outputs.reserve(program.outputs.size());
  for (const auto& output : program.outputs) outputs.push_back(output_value(output, frame));
  return outputs;
}

}  // namespace

Program Program::load(const std::string& folder) {
  return Program(std::make_shared<const State>(State{inductor::read_program(folder)}));
}

const std::vector<Input>& Program::inputs() const { return state_->file.call.inputs; }

std::vector<c10::IValue> Program::run(const std::vector<c10::IValue>& inputs) const {
  const auto state = state_;  // stays while it runs
  const Call& call = state->file.call;
  check_inputs(call, inputs);
  const Numbers numbers = measured(call, inputs);
  check_relations(call, inputs, numbers);
  const c10::NoGradGuard no_grad;
  const Values outputs = run_program(state->file, inputs, numbers);
  for (const auto& written : call.written) {
    const at::Tensor& to = written.is_input ? inputs[written.index].toTensor() : state->file.tensors[written.index];
    to.copy_(outputs[written.output].toTensor());
  }
  for (const int32_t met : call.met) {
    const c10::IValue& value = outputs[met];
    if (value.isTensor() ? !value.toTensor().item().toBool() : !value.toInt()) {
      throw std::runtime_error("a condition that the program raises without is not met: " + call.conditions);
    }
  }
  Values results;
  results.reserve(call.results.size());
  for (const Result& result : call.results) {
    switch (result.kind) {
      case Result::Kind::Output: results.push_back(outputs[result.index]); break;
      case Result::Kind::Input: results.push_back(inputs[result.index]); break;
      case Result::Kind::Integer: results.emplace_back(evaluated(result.number, numbers)); break;
      case Result::Kind::Float: results.emplace_back(inductor::bits_float(evaluated(result.number, numbers))); break;
      case Result::Kind::Fixed: results.push_back(result.fixed); break;
    }
  }
  return results;
}

std::vector<at::Tensor> Program::operator()(const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> tensors;
  for (c10::IValue& result : run(Values(inputs.begin(), inputs.end()))) {
    if (!result.isTensor()) {
      throw std::invalid_argument("result " + std::to_string(tensors.size()) + " is a " + result.tagKind() + ", no tensor: call run()");
    }
    tensors.push_back(std::move(result).toTensor());
  }
  return tensors;
}

}  // namespace torchinductor

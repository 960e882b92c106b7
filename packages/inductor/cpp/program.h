// The flat program and its instructions: what `torchinductor.program` describes, prepared for running.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <primtorch/size_program.h>

#include "cuda_driver.h"
#include "cuda_products.h"

namespace c10 {
class OperatorHandle;
}

namespace inductor {

using primtorch::bits_float;
using primtorch::float_bits;
using primtorch::SizeProgram;

// A list of integers, some of which are read from the run's value table.
struct Dims {
  std::vector<int64_t> fixed;
  std::vector<std::pair<int32_t, int32_t>> patches;  // (position, index into the value table)
};

// An ATen argument: a finished IValue, or a recipe that reads slots and values. A `List` is of a kind that the operator's
// schema says; in an instruction there is none.
struct Argument {
  enum class Kind : int8_t { Fixed, Slot, Value, FloatValue, List, Tensors, OptionalTensors, Integers, Numbers };
  Kind kind = Kind::Fixed;
  c10::IValue fixed;
  int32_t index = 0;
  std::vector<Argument> items;
};

// Where one result of an ATen call goes.
struct Destination {
  enum class Kind : int8_t { Drop, Slot, Symbol, List };
  Kind kind = Kind::Drop;
  int32_t index = 0;
  std::vector<Destination> items;
};

// Returns nonzero where it met an index outside its dimension.
using KernelFunction = int (*)(void* const* buffers, const int64_t* symbols);

enum class Opcode : int8_t { Alloc, Free, View, Claim, Kernel, Triton, Aten, Python, ReadScalar, Require, Expect };

// Runs a Python callable on tensors and integers; takes the GIL itself.
using PythonCall = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&, c10::ArrayRef<int64_t>)>;

struct Instruction {
  Opcode opcode;
  int32_t dst = -1;
  int32_t src = -1;  // of Require: the value that is to be true
  std::string name;  // what an error calls this instruction
  std::string why;  // of Require: what its error says
  std::string label;  // what a profiler calls it; empty for what takes no time
  Dims shape, strides, offset;  // offset has one entry; a kernel's symbols and a launch's grid use `shape` and `strides`
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::Device device{c10::DeviceType::CPU};
  std::vector<int32_t> buffers;
  std::vector<int32_t> written;  // positions in `buffers` that a Triton kernel writes
  KernelFunction kernel = nullptr;
  std::shared_ptr<TritonKernel> triton;
  std::shared_ptr<c10::OperatorHandle> op;
  bool foreign = false;  // an operator of another library, whose kernel may be a program that derives
  std::shared_ptr<CudaProduct> product;  // of an ATen call that is a product of matrices
  PythonCall python;
  std::function<void(const std::string&)> mended;  // told, behind the run, of a layout that was mended
  std::vector<Argument> arguments;
  std::vector<Destination> destinations;
  std::vector<int32_t> refreshed;  // values to evaluate again, now that a symbol is known
};

struct Input {
  bool is_symbol = false;
  int32_t index = 0;  // slot or symbol
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::Device device{c10::DeviceType::CPU};
  int64_t dim = 0;
  std::string name;
  bool claimed = false;  // an instruction takes its memory where nobody else holds it
};

struct Output {
  enum class Kind : int8_t { None, Slot, Value, FloatValue, Integer, Float };
  Kind kind = Kind::None;
  int64_t index = 0;  // the integer itself for Kind::Integer
  double number = 0;
};

struct Program {
  int32_t slots = 0;
  int32_t symbols = 0;
  std::vector<Input> inputs;
  std::vector<std::pair<int32_t, at::Tensor>> constants;
  std::vector<SizeProgram> values;
  std::vector<int32_t> initial_values;  // those that the inputs' symbols decide
  std::vector<Instruction> instructions;
  std::vector<Output> outputs;
  c10::Device device{c10::DeviceType::CPU};  // the accelerator it runs on, if any
  std::function<void*()> current_stream;  // the accelerator's native stream; called with the GIL
};

// The state of one call: a program may run on several threads at a time.
struct Frame {
  at::Tensor* slots;
  int64_t* symbols;
  int64_t* values;
  void* stream = nullptr;
  std::vector<std::pair<const Instruction*, std::string>> mended;  // `Expect`s that did not hold, and what was found
};

// Runs every instruction. Called without the GIL. Throws what the instruction threw, with its name added.
void run(const Program& program, Frame& frame);
void run_aten(const Instruction& instruction, Frame& frame);

// Another tensor over the same memory: who counts those that hold it then sees whether there are more.
at::Tensor alias_of(const at::Tensor& tensor);
at::Tensor allocate_cuda(c10::IntArrayRef shape, c10::IntArrayRef strides, c10::ScalarType dtype, c10::Device device);

}  // namespace inductor

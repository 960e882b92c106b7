// Runs what `torchcompile.save_cpp` wrote, without Python: docs/artifacts.md.
//
//     const auto program = torchinductor::Program::load("folder");
//     std::vector<at::Tensor> results = program({x});
//
// Link with libtorchinductor, torch, torch_cpu and c10.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#define TORCHINDUCTOR_API __attribute__((visibility("default")))

namespace torchinductor {

// A folder that is torn, none of `save_cpp`'s, or for another torch, processor or format. what() names each difference.
class TORCHINDUCTOR_API LoadError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Inputs that the program was not compiled for. what() names the input and the difference.
class TORCHINDUCTOR_API InputError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// One input of a program, in the order in which a call takes them: the tensors and the varying numbers among the
// arguments that it was exported with.
struct Input {
  enum class Kind { Tensor, Integer, Float };
  std::string name;  // as the exported function calls it
  Kind kind = Kind::Tensor;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of a tensor; Undefined where the program does not read it
  std::vector<int64_t> sizes, strides;                 // of a tensor; -1 where one varies
};

// A compiled program with its constants. Copies share it. Any number of threads may call it at a time, unless it writes
// to tensors of its own, such as statistics. Calls record no gradients. What a call does in parallel, it does with the
// OpenMP threads of the thread that calls.
class TORCHINDUCTOR_API Program {
 public:
  // Raises LoadError.
  static Program load(const std::string& folder);

  // The results, of tensors. Raises InputError; std::invalid_argument where an input or a result is no tensor (see
  // `run`); what an operator raises, as c10::Error.
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs) const;

  // The same with whatever the exported function takes and gives: tensors, integers and floats; of results also None,
  // bools, complex numbers and texts.
  std::vector<c10::IValue> run(const std::vector<c10::IValue>& inputs) const;

  const std::vector<Input>& inputs() const;

 private:
  struct State;
  explicit Program(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

}  // namespace torchinductor

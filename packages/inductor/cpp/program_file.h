// Reads the folder that `torchinductor.program_file` writes, which says what each field is.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchinductor/program.h>

#include "program.h"

namespace inductor {

// A number that a call tells.
struct Measure {
  enum class Kind : int8_t { Size, Stride, Offset, Number };
  Kind kind = Kind::Number;
  int32_t input = 0;
  int32_t dim = 0;
};

// What has to hold between the measures of a call.
struct Relation {
  SizeProgram holds;
  std::string text;
};

// What an input of the program is given.
struct Feed {
  int32_t input = -1;  // of the call; else a number
  SizeProgram number;
};

// One result of a call.
struct Result {
  enum class Kind : int8_t { Output, Input, Integer, Float, Fixed };
  Kind kind = Kind::Fixed;
  int32_t index = 0;
  SizeProgram number;
  c10::IValue fixed;
};

// An output of the program that is the new value of a tensor which the call writes to.
struct Written {
  bool is_input = false;
  int32_t index = 0;  // of the call's inputs, or of the file's tensors
  int32_t output = 0;
};

// What a call looks like, and what has to hold of it.
struct Call {
  using Pairs = std::vector<std::pair<int32_t, int32_t>>;
  std::vector<torchinductor::Input> inputs;
  std::vector<Measure> measures;
  std::vector<Relation> relations;
  Pairs same, different, apart;  // inputs that are one tensor, that are not, that share no memory
  std::vector<Feed> feeds;
  std::vector<Written> written;
  std::vector<int32_t> met;  // outputs that say whether a condition holds
  std::string conditions;    // the lines that ask for them
  std::vector<Result> results;
};

struct ProgramFile {
  std::shared_ptr<const Program> program;
  Call call;
  std::vector<at::Tensor> tensors;
  std::vector<std::shared_ptr<void>> libraries;  // in which the kernels are
};

// Raises torchinductor::LoadError.
ProgramFile read_program(const std::string& folder);

}  // namespace inductor

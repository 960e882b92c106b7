// Relations between the numbers of a call: size programs that must come out true.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <primtorch/size_program.h>

#include "refs.h"

namespace torchdynamo {

using primtorch::float_bits;

class ShapeProgram {
 public:
  // Reads a `schemas.ShapeProgram`; `slot` gives the place of a symbol's source in the vector that `holds` gets, or -1
  // with an exception set. False with an exception set when the record is malformed.
  bool read(PyObject* record, const std::function<int(PyObject*)>& slot);

  // Whether the expression is true. Arithmetic that overflows, divides by zero or raises in Python makes it false: the
  // guard fails.
  bool holds(const std::vector<int64_t>& numbers) const {
    int64_t value = 0;
    return program_.evaluate(numbers.data(), &value) && value != 0;
  }

 private:
  primtorch::SizeProgram program_;
};

}  // namespace torchdynamo

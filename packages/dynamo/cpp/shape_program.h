// Postfix programs over 64-bit integers: relations between sizes.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "refs.h"

namespace torchdynamo {

class ShapeProgram {
 public:
  // Reads a `schemas.ShapeProgram`; `slot` gives the place of a symbol's source in the vector that `holds` gets, or -1
  // with an exception set. False with an exception set when the record is malformed.
  bool read(PyObject* record, const std::function<int(PyObject*)>& slot);

  // Whether the expression is true. Arithmetic that overflows or divides by zero makes it false: the guard fails.
  bool holds(const std::vector<int64_t>& numbers) const;

  enum class Op { constant, symbol, add, sub, mul, floordiv, mod, min, max, neg, eq, ne, lt, le, gt, ge, conj, disj, negate };

 private:
  struct Step {
    Op op;
    int64_t argument;
  };
  std::vector<Step> steps_;
};

}  // namespace torchdynamo

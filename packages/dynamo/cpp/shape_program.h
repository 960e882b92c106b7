// Postfix programs over 64-bit words, integers and the bits of floats: relations between the numbers of a call.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "refs.h"

namespace torchdynamo {

inline int64_t float_bits(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

class ShapeProgram {
 public:
  // Reads a `schemas.ShapeProgram`; `slot` gives the place of a symbol's source in the vector that `holds` gets, or -1
  // with an exception set. False with an exception set when the record is malformed.
  bool read(PyObject* record, const std::function<int(PyObject*)>& slot);

  // Whether the expression is true. Arithmetic that overflows, divides by zero or raises in Python makes it false: the
  // guard fails.
  bool holds(const std::vector<int64_t>& numbers) const;

  enum class Op {
    constant, symbol, keep, kept,
    // integers and truth values
    add, sub, mul, floordiv, mod, min, max, neg, eq, ne, lt, le, gt, ge, conj, disj, negate,
    bitand_, bitor_, bitxor_, lshift, rshift, ipow,
    // floats
    fadd, fsub, fmul, fdiv, fmod, ffloordiv, fpow, fmin, fmax, fneg, fabs,
    sqrt, exp, expm1, log, log1p, log2, log10, sin, cos, tan, tanh, atan,
    feq, fne, flt, fle, fgt, fge, fsame,
    // between them
    to_float, idiv, trunc, floor, ceil, round, defined,
  };

 private:
  struct Step {
    Op op;
    int64_t argument;
  };
  std::vector<Step> steps_;
  size_t kept_ = 0;
};

}  // namespace torchdynamo

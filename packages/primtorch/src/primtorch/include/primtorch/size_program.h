// Postfix programs over 64-bit words, integers and the bits of floats: what `primtorch.symbolic` expressions become where
// a call's sizes are known. For the C++ of guards and of compiled graphs, whose answers must be the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace primtorch {

inline int64_t float_bits(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline double bits_float(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

enum class SizeOp : int8_t {
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

namespace size_program {

constexpr size_t kInline = 64;  // values of a stack that need no memory of their own
constexpr int64_t kExact = int64_t{1} << 53;  // up to here every integer is a float

// The operation that an expression's program calls by a name, if there is one.
inline std::optional<SizeOp> operation(const std::string& name) {
  using Op = SizeOp;
  static const std::unordered_map<std::string, Op> names = {
      {"const", Op::constant}, {"fconst", Op::constant}, {"sym", Op::symbol}, {"keep", Op::keep}, {"kept", Op::kept},
      {"add", Op::add}, {"sub", Op::sub}, {"mul", Op::mul}, {"floordiv", Op::floordiv}, {"mod", Op::mod},
      {"min", Op::min}, {"max", Op::max}, {"neg", Op::neg},
      {"eq", Op::eq}, {"ne", Op::ne}, {"lt", Op::lt}, {"le", Op::le}, {"gt", Op::gt}, {"ge", Op::ge},
      {"and", Op::conj}, {"or", Op::disj}, {"not", Op::negate},
      {"bitand", Op::bitand_}, {"bitor", Op::bitor_}, {"bitxor", Op::bitxor_}, {"lshift", Op::lshift},
      {"rshift", Op::rshift}, {"ipow", Op::ipow},
      {"fadd", Op::fadd}, {"fsub", Op::fsub}, {"fmul", Op::fmul}, {"fdiv", Op::fdiv}, {"fmod", Op::fmod},
      {"ffloordiv", Op::ffloordiv}, {"fpow", Op::fpow}, {"fmin", Op::fmin}, {"fmax", Op::fmax}, {"fneg", Op::fneg},
      {"fabs", Op::fabs}, {"sqrt", Op::sqrt}, {"exp", Op::exp}, {"expm1", Op::expm1}, {"log", Op::log},
      {"log1p", Op::log1p}, {"log2", Op::log2}, {"log10", Op::log10}, {"sin", Op::sin}, {"cos", Op::cos},
      {"tan", Op::tan}, {"tanh", Op::tanh}, {"atan", Op::atan},
      {"feq", Op::feq}, {"fne", Op::fne}, {"flt", Op::flt}, {"fle", Op::fle}, {"fgt", Op::fgt}, {"fge", Op::fge},
      {"fsame", Op::fsame},
      {"float", Op::to_float}, {"idiv", Op::idiv}, {"trunc", Op::trunc}, {"floor", Op::floor}, {"ceil", Op::ceil},
      {"round", Op::round}, {"defined", Op::defined},
  };
  const auto found = names.find(name);
  return found == names.end() ? std::nullopt : std::optional(found->second);
}

inline size_t arity(SizeOp op) {
  using Op = SizeOp;
  switch (op) {
    case Op::constant: case Op::symbol: case Op::kept:
      return 0;
    case Op::keep: case Op::neg: case Op::negate: case Op::fneg: case Op::fabs: case Op::sqrt: case Op::exp:
    case Op::expm1: case Op::log: case Op::log1p: case Op::log2: case Op::log10: case Op::sin: case Op::cos:
    case Op::tan: case Op::tanh: case Op::atan: case Op::to_float: case Op::trunc: case Op::floor: case Op::ceil:
    case Op::round: case Op::defined:
      return 1;
    default:
      return 2;
  }
}

inline bool give(double value, int64_t* out) {
  *out = float_bits(value);
  return true;
}

// A result that Python refuses: infinite or NaN from operands that are neither.
inline bool give_finite(double value, bool operands_are_finite, int64_t* out) {
  return (std::isfinite(value) || !operands_are_finite) && give(value, out);
}

inline bool give_integer(double value, int64_t* out) {
  if (!(std::fabs(value) <= static_cast<double>(int64_t{1} << 62))) return false;
  *out = static_cast<int64_t>(value);
  return true;
}

// Python's float `%` and `//`: the rest has the sign of the divisor.
inline bool float_divmod(double a, double b, double* quotient, double* rest) {
  if (b == 0.0) return false;
  double mod = std::fmod(a, b), div = (a - mod) / b;
  if (mod != 0.0) {
    if ((b < 0) != (mod < 0)) {
      mod += b;
      div -= 1.0;
    }
  } else {
    mod = std::copysign(0.0, b);
  }
  double floored = std::copysign(0.0, a / b);
  if (div != 0.0) {
    floored = std::floor(div);
    if (div - floored > 0.5) floored += 1.0;
  }
  *quotient = floored;
  *rest = mod;
  return true;
}

inline bool float_power(double a, double b, int64_t* out) {
  if (a == 0.0 && b < 0.0) return false;
  if (a < 0.0 && std::isfinite(a) && std::isfinite(b) && b != std::floor(b)) return false;  // complex in Python
  return give_finite(std::pow(a, b), std::isfinite(a) && std::isfinite(b), out);
}

inline bool integer_power(int64_t a, int64_t b, int64_t* out) {
  if (b < 0) return false;
  int64_t result = 1;
  while (b > 0) {
    if ((b & 1) != 0 && __builtin_mul_overflow(result, a, &result)) return false;
    b >>= 1;
    if (b > 0 && __builtin_mul_overflow(a, a, &a)) return false;
  }
  *out = result;
  return true;
}

inline bool floor_divide(SizeOp op, int64_t a, int64_t b, int64_t* out) {
  if (b == 0 || (a == INT64_MIN && b == -1)) return false;
  int64_t quotient = a / b, rest = a % b;
  if (rest != 0 && (rest < 0) != (b < 0)) {
    quotient -= 1;
    rest += b;
  }
  *out = op == SizeOp::floordiv ? quotient : rest;
  return true;
}

inline bool shift(SizeOp op, int64_t a, int64_t b, int64_t* out) {
  if (b < 0) return false;
  if (op == SizeOp::rshift) {
    *out = a >> std::min<int64_t>(b, 63);
    return true;
  }
  return b < 62 && !__builtin_mul_overflow(a, int64_t{1} << b, out);
}

// Division rounds toward minus infinity, as Python's does.
inline bool apply_integers(SizeOp op, int64_t a, int64_t b, int64_t* out) {
  using Op = SizeOp;
  switch (op) {
    case Op::add: return !__builtin_add_overflow(a, b, out);
    case Op::sub: return !__builtin_sub_overflow(a, b, out);
    case Op::mul: return !__builtin_mul_overflow(a, b, out);
    case Op::floordiv: case Op::mod: return floor_divide(op, a, b, out);
    case Op::min: *out = std::min(a, b); return true;
    case Op::max: *out = std::max(a, b); return true;
    case Op::eq: *out = a == b; return true;
    case Op::ne: *out = a != b; return true;
    case Op::lt: *out = a < b; return true;
    case Op::le: *out = a <= b; return true;
    case Op::gt: *out = a > b; return true;
    case Op::ge: *out = a >= b; return true;
    case Op::conj: *out = (a != 0) & (b != 0); return true;
    case Op::disj: *out = (a != 0) | (b != 0); return true;
    case Op::bitand_: *out = a & b; return true;
    case Op::bitor_: *out = a | b; return true;
    case Op::bitxor_: *out = a ^ b; return true;
    case Op::lshift: case Op::rshift: return shift(op, a, b, out);
    case Op::ipow: return integer_power(a, b, out);
    case Op::idiv:
      if (b == 0 || std::abs(a) > kExact || std::abs(b) > kExact) return false;
      return give(static_cast<double>(a) / static_cast<double>(b), out);
    default: return false;
  }
}

inline bool apply_floats(SizeOp op, double a, double b, int64_t* out) {
  using Op = SizeOp;
  double quotient, rest;
  switch (op) {
    case Op::fadd: return give(a + b, out);
    case Op::fsub: return give(a - b, out);
    case Op::fmul: return give(a * b, out);
    case Op::fdiv: return b != 0.0 && give(a / b, out);
    case Op::fmod: return float_divmod(a, b, &quotient, &rest) && give(rest, out);
    case Op::ffloordiv: return float_divmod(a, b, &quotient, &rest) && give(quotient, out);
    case Op::fpow: return float_power(a, b, out);
    case Op::fmin: return give(b < a ? b : a, out);
    case Op::fmax: return give(b > a ? b : a, out);
    case Op::feq: *out = a == b; return true;
    case Op::fne: *out = a != b; return true;
    case Op::flt: *out = a < b; return true;
    case Op::fle: *out = a <= b; return true;
    case Op::fgt: *out = a > b; return true;
    case Op::fge: *out = a >= b; return true;
    case Op::fsame: *out = (std::isnan(a) && std::isnan(b)) || float_bits(a) == float_bits(b); return true;
    default: return false;
  }
}

inline bool apply_function(SizeOp op, double a, int64_t* out) {
  using Op = SizeOp;
  bool finite = std::isfinite(a);
  switch (op) {
    case Op::fneg: return give(-a, out);
    case Op::fabs: return give(std::fabs(a), out);
    case Op::sqrt: return !(a < 0.0) && give(std::sqrt(a), out);
    case Op::exp: return give_finite(std::exp(a), finite, out);
    case Op::expm1: return give_finite(std::expm1(a), finite, out);
    case Op::log: return !(a <= 0.0) && give(std::log(a), out);
    case Op::log1p: return !(a <= -1.0) && give(std::log1p(a), out);
    case Op::log2: return !(a <= 0.0) && give(std::log2(a), out);
    case Op::log10: return !(a <= 0.0) && give(std::log10(a), out);
    case Op::sin: return !std::isinf(a) && give(std::sin(a), out);
    case Op::cos: return !std::isinf(a) && give(std::cos(a), out);
    case Op::tan: return !std::isinf(a) && give(std::tan(a), out);
    case Op::tanh: return give(std::tanh(a), out);
    case Op::atan: return give(std::atan(a), out);
    case Op::trunc: return give_integer(std::trunc(a), out);
    case Op::floor: return give_integer(std::floor(a), out);
    case Op::ceil: return give_integer(std::ceil(a), out);
    case Op::round: return give_integer(std::nearbyint(a), out);
    default: return false;
  }
}

inline bool apply_one(SizeOp op, int64_t a, int64_t* out) {
  switch (op) {
    case SizeOp::neg: return !__builtin_sub_overflow(int64_t{0}, a, out);
    case SizeOp::negate: *out = a == 0; return true;
    case SizeOp::defined: *out = 1; return true;  // it was computed
    case SizeOp::to_float: return give(static_cast<double>(a), out);
    default: return apply_function(op, bits_float(a), out);
  }
}

inline bool apply_two(SizeOp op, int64_t a, int64_t b, int64_t* out) {
  bool floats = op >= SizeOp::fadd && op <= SizeOp::fsame;
  return floats ? apply_floats(op, bits_float(a), bits_float(b), out) : apply_integers(op, a, b, out);
}

}  // namespace size_program

class SizeProgram {
 public:
  // Adds a step. `argument`: the bits of a constant, the place of a symbol's number, the number of a kept value. False
  // where the steps before it do not leave its operands.
  bool push(SizeOp op, int64_t argument) {
    if (op == SizeOp::keep) kept_ = std::max(kept_, static_cast<size_t>(argument) + 1);
    const bool unknown = op == SizeOp::kept && (argument < 0 || static_cast<size_t>(argument) >= kept_);
    const size_t taken = size_program::arity(op);
    if (unknown || depth_ < taken) return false;
    depth_ = depth_ - taken + 1;
    deepest_ = std::max(deepest_, depth_);
    steps_.push_back({op, argument});
    return true;
  }

  bool leaves_one_value() const { return depth_ == 1; }

  // The value for the numbers of the symbols. False where Python would raise, or where a result does not fit.
  bool evaluate(const int64_t* numbers, int64_t* out) const {
    int64_t few[size_program::kInline];
    std::vector<int64_t> many(deepest_ > size_program::kInline ? deepest_ : 0), kept(kept_);  // empty ones cost nothing
    int64_t* const stack = many.empty() ? few : many.data();
    size_t top = 0;
    for (const Step& step : steps_) {
      switch (step.op) {
        case SizeOp::constant:
          stack[top++] = step.argument;
          break;
        case SizeOp::symbol:
          stack[top++] = numbers[step.argument];
          break;
        case SizeOp::keep:
          kept[step.argument] = stack[top - 1];
          break;
        case SizeOp::kept:
          stack[top++] = kept[step.argument];
          break;
        default:
          if (size_program::arity(step.op) == 1) {
            if (!size_program::apply_one(step.op, stack[top - 1], &stack[top - 1])) return false;
          } else {
            top--;
            if (!size_program::apply_two(step.op, stack[top - 1], stack[top], &stack[top - 1])) return false;
          }
      }
    }
    *out = stack[0];
    return true;
  }

 private:
  struct Step {
    SizeOp op;
    int64_t argument;
  };
  std::vector<Step> steps_;
  size_t kept_ = 0;
  size_t depth_ = 0;
  size_t deepest_ = 0;
};

}  // namespace primtorch

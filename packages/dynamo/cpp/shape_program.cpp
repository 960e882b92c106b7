#include "shape_program.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_map>

namespace torchdynamo {
namespace {

using Op = ShapeProgram::Op;
constexpr size_t kStack = 64;
constexpr int64_t kExact = int64_t{1} << 53;  // up to here every integer is a float

const std::unordered_map<std::string, Op>& op_names() {
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
  return names;
}

size_t arity(Op op) {
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

double as_float(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

bool give(double value, int64_t* out) {
  *out = float_bits(value);
  return true;
}

// A result that Python refuses: infinite or NaN from operands that are neither.
bool give_finite(double value, bool operands_are_finite, int64_t* out) {
  return (std::isfinite(value) || !operands_are_finite) && give(value, out);
}

bool give_integer(double value, int64_t* out) {
  if (!(std::fabs(value) <= static_cast<double>(int64_t{1} << 62))) return false;
  *out = static_cast<int64_t>(value);
  return true;
}

// Python's float `%` and `//`: the rest has the sign of the divisor.
bool float_divmod(double a, double b, double* quotient, double* rest) {
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

bool float_power(double a, double b, int64_t* out) {
  if (a == 0.0 && b < 0.0) return false;
  if (a < 0.0 && std::isfinite(a) && std::isfinite(b) && b != std::floor(b)) return false;  // complex in Python
  return give_finite(std::pow(a, b), std::isfinite(a) && std::isfinite(b), out);
}

bool integer_power(int64_t a, int64_t b, int64_t* out) {
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

bool floor_divide(Op op, int64_t a, int64_t b, int64_t* out) {
  if (b == 0 || (a == INT64_MIN && b == -1)) return false;
  int64_t quotient = a / b, rest = a % b;
  if (rest != 0 && (rest < 0) != (b < 0)) {
    quotient -= 1;
    rest += b;
  }
  *out = op == Op::floordiv ? quotient : rest;
  return true;
}

bool shift(Op op, int64_t a, int64_t b, int64_t* out) {
  if (b < 0) return false;
  if (op == Op::rshift) {
    *out = a >> std::min<int64_t>(b, 63);
    return true;
  }
  return b < 62 && !__builtin_mul_overflow(a, int64_t{1} << b, out);
}

// False where Python raises, or where the result does not fit. Division rounds toward minus infinity, as Python's does.
bool apply_integers(Op op, int64_t a, int64_t b, int64_t* out) {
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

bool apply_floats(Op op, double a, double b, int64_t* out) {
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

bool apply_function(Op op, double a, int64_t* out) {
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

bool apply_one(Op op, int64_t a, int64_t* out) {
  switch (op) {
    case Op::neg: return !__builtin_sub_overflow(int64_t{0}, a, out);
    case Op::negate: *out = a == 0; return true;
    case Op::defined: *out = 1; return true;  // it was computed
    case Op::to_float: return give(static_cast<double>(a), out);
    default: return apply_function(op, as_float(a), out);
  }
}

bool apply_two(Op op, int64_t a, int64_t b, int64_t* out) {
  bool floats = op >= Op::fadd && op <= Op::fsame;
  return floats ? apply_floats(op, as_float(a), as_float(b), out) : apply_integers(op, a, b, out);
}

}  // namespace

bool ShapeProgram::read(PyObject* record, const std::function<int(PyObject*)>& slot) {
  Ref field = Ref::steal(PyObject_GetAttrString(record, "program"));
  Ref steps = field ? Ref::steal(PySequence_Tuple(field.get())) : Ref();
  Ref symbols = steps ? Ref::steal(PyObject_GetAttrString(record, "symbols")) : Ref();
  if (!symbols) return false;
  size_t depth = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps.get()); i++) {
    const char* name = nullptr;
    PyObject* argument = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps.get(), i), "sO", &name, &argument)) return false;
    auto found = op_names().find(name);
    if (found == op_names().end()) {
      PyErr_Format(PyExc_ValueError, "shape program: unknown operation %s", name);
      return false;
    }
    Step step{found->second, 0};
    if (step.op == Op::constant && PyFloat_CheckExact(argument)) {
      step.argument = float_bits(PyFloat_AS_DOUBLE(argument));
    } else if (step.op == Op::constant || step.op == Op::keep || step.op == Op::kept) {
      step.argument = PyLong_AsLongLong(argument);
      if (PyErr_Occurred()) return false;
      if (step.op == Op::keep) kept_ = std::max(kept_, static_cast<size_t>(step.argument) + 1);
    } else if (step.op == Op::symbol) {
      Ref source = Ref::steal(PyObject_GetItem(symbols.get(), argument));
      step.argument = source ? slot(source.get()) : -1;
      if (step.argument < 0) return false;
    }
    bool unknown = step.op == Op::kept && (step.argument < 0 || static_cast<size_t>(step.argument) >= kept_);
    size_t taken = arity(step.op);
    if (unknown || depth < taken || depth - taken + 1 > kStack) {
      PyErr_SetString(PyExc_ValueError, "shape program: malformed, or deeper than 64 values");
      return false;
    }
    depth = depth - taken + 1;
    steps_.push_back(step);
  }
  if (depth != 1) {
    PyErr_SetString(PyExc_ValueError, "shape program: it must leave one value");
    return false;
  }
  return true;
}

bool ShapeProgram::holds(const std::vector<int64_t>& numbers) const {
  int64_t stack[kStack];
  size_t top = 0;
  std::vector<int64_t> kept(kept_);  // allocates nothing where nothing is kept
  for (const Step& step : steps_) {
    switch (step.op) {
      case Op::constant:
        stack[top++] = step.argument;
        break;
      case Op::symbol:
        stack[top++] = numbers[step.argument];
        break;
      case Op::keep:
        kept[step.argument] = stack[top - 1];
        break;
      case Op::kept:
        stack[top++] = kept[step.argument];
        break;
      default:
        if (arity(step.op) == 1) {
          if (!apply_one(step.op, stack[top - 1], &stack[top - 1])) return false;
        } else {
          top--;
          if (!apply_two(step.op, stack[top - 1], stack[top], &stack[top - 1])) return false;
        }
    }
  }
  return stack[0] != 0;
}

}  // namespace torchdynamo

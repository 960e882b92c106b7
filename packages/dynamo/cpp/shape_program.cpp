#include "shape_program.h"

#include <algorithm>
#include <string>
#include <unordered_map>

namespace torchdynamo {
namespace {

using Op = ShapeProgram::Op;
constexpr size_t kStack = 64;

const std::unordered_map<std::string, Op>& op_names() {
  static const std::unordered_map<std::string, Op> names = {
      {"const", Op::constant}, {"sym", Op::symbol}, {"add", Op::add}, {"sub", Op::sub}, {"mul", Op::mul},
      {"floordiv", Op::floordiv}, {"mod", Op::mod}, {"min", Op::min}, {"max", Op::max}, {"neg", Op::neg},
      {"eq", Op::eq}, {"ne", Op::ne}, {"lt", Op::lt}, {"le", Op::le}, {"gt", Op::gt}, {"ge", Op::ge},
      {"and", Op::conj}, {"or", Op::disj}, {"not", Op::negate},
  };
  return names;
}

size_t arity(Op op) {
  if (op == Op::constant || op == Op::symbol) return 0;
  return op == Op::neg || op == Op::negate ? 1 : 2;
}

// False on overflow or division by zero. Division rounds toward minus infinity, as Python's does.
bool apply(Op op, int64_t a, int64_t b, int64_t* out) {
  switch (op) {
    case Op::add: return !__builtin_add_overflow(a, b, out);
    case Op::sub: return !__builtin_sub_overflow(a, b, out);
    case Op::mul: return !__builtin_mul_overflow(a, b, out);
    case Op::floordiv:
    case Op::mod: {
      if (b == 0 || (a == INT64_MIN && b == -1)) return false;
      int64_t quotient = a / b, rest = a % b;
      if (rest != 0 && (rest < 0) != (b < 0)) {
        quotient -= 1;
        rest += b;
      }
      *out = op == Op::floordiv ? quotient : rest;
      return true;
    }
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
    default: return false;
  }
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
    if (step.op == Op::constant) {
      step.argument = PyLong_AsLongLong(argument);
      if (PyErr_Occurred()) return false;
    } else if (step.op == Op::symbol) {
      Ref source = Ref::steal(PyObject_GetItem(symbols.get(), argument));
      step.argument = source ? slot(source.get()) : -1;
      if (step.argument < 0) return false;
    }
    size_t taken = arity(step.op);
    if (depth < taken || depth - taken + 1 > kStack) {
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
  for (const Step& step : steps_) {
    switch (step.op) {
      case Op::constant:
        stack[top++] = step.argument;
        break;
      case Op::symbol:
        stack[top++] = numbers[step.argument];
        break;
      case Op::neg:
        if (__builtin_sub_overflow(int64_t{0}, stack[top - 1], &stack[top - 1])) return false;
        break;
      case Op::negate:
        stack[top - 1] = stack[top - 1] == 0;
        break;
      default:
        top--;
        if (!apply(step.op, stack[top - 1], stack[top], &stack[top - 1])) return false;
    }
  }
  return stack[0] != 0;
}

}  // namespace torchdynamo

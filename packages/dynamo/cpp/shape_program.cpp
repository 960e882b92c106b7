#include "shape_program.h"

namespace torchdynamo {
namespace {

using primtorch::SizeOp;

// The argument of a step; false with an exception set.
bool read_argument(SizeOp op, PyObject* argument, PyObject* symbols, const std::function<int(PyObject*)>& slot,
                   int64_t* out) {
  if (op == SizeOp::constant && PyFloat_CheckExact(argument)) {
    *out = float_bits(PyFloat_AS_DOUBLE(argument));
  } else if (op == SizeOp::constant || op == SizeOp::keep || op == SizeOp::kept) {
    *out = PyLong_AsLongLong(argument);
    return !PyErr_Occurred();
  } else if (op == SizeOp::symbol) {
    Ref source = Ref::steal(PyObject_GetItem(symbols, argument));
    *out = source ? slot(source.get()) : -1;
    return *out >= 0;
  }
  return true;
}

}  // namespace

bool ShapeProgram::read(PyObject* record, const std::function<int(PyObject*)>& slot) {
  Ref field = Ref::steal(PyObject_GetAttrString(record, "program"));
  Ref steps = field ? Ref::steal(PySequence_Tuple(field.get())) : Ref();
  Ref symbols = steps ? Ref::steal(PyObject_GetAttrString(record, "symbols")) : Ref();
  if (!symbols) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps.get()); i++) {
    const char* name = nullptr;
    PyObject* given = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps.get(), i), "sO", &name, &given)) return false;
    const auto op = primtorch::size_program::operation(name);
    if (!op) {
      PyErr_Format(PyExc_ValueError, "shape program: unknown operation %s", name);
      return false;
    }
    int64_t argument = 0;
    if (!read_argument(*op, given, symbols.get(), slot, &argument)) return false;
    if (!program_.push(*op, argument)) {
      PyErr_SetString(PyExc_ValueError, "shape program: malformed");
      return false;
    }
  }
  if (!program_.leaves_one_value()) {
    PyErr_SetString(PyExc_ValueError, "shape program: it must leave one value");
    return false;
  }
  return true;
}

}  // namespace torchdynamo

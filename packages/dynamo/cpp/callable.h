// The compiled callable: binds a call's arguments, finds the entry whose guards hold, runs its code.
#pragma once

#include "refs.h"

namespace torchdynamo {

bool is_callable(PyObject* object);
PyObject* callable_function(PyObject* callable);  // borrowed

// Runs the entry that fits the flat arguments, capturing one on a miss. Null with `*eager` set, and no exception: the
// function is to be run as it is. `function` has the callable's code; its globals and closure are the ones read.
PyObject* dispatch(PyObject* callable, PyObject* function, PyObject* const* flat, Py_ssize_t count, bool* eager);

// Number of slots in the flat argument vector of a code object.
Py_ssize_t flat_size(const PyCodeObject* code);

int add_callable_types(PyObject* module);

// define_call(function): what CompiledCallable's dictionary has as `__call__`. A call goes through the type's slot as
// before; this is for those who look the method up, such as tracers, which can read a Python function.
PyObject* define_call(PyObject*, PyObject* function);

// force_eager(bool): whether every compiled callable runs its function as it was written.
PyObject* force_eager(PyObject*, PyObject* whether);

}  // namespace torchdynamo

// Guards as a tree of accesses: one traversal checks a call and collects the compiled code's inputs.
#pragma once

#include "refs.h"

namespace torchdynamo {

// What a source's root is read from.
struct Scope {
  PyObject* const* flat;  // the flat argument vector: positional, keyword-only, *args tuple, **kwargs dict
  Py_ssize_t count;
  PyObject* globals;
  PyObject* closure;  // tuple of cells, or null
};

// The list of inputs (new reference) when every guard holds. Null without an exception when one fails
// (`*failed` is its index), null with an exception when a predicate raised.
PyObject* check_tree(PyObject* tree, const Scope& scope, Py_ssize_t* failed);

bool is_tree(PyObject* object);
PyObject* tree_guards(PyObject* tree);  // borrowed tuple

int add_guard_tree_type(PyObject* module);

}  // namespace torchdynamo

// Ownership of Python references, and the few things of the C API that changed between versions.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

namespace torchdynamo {

// One owned reference, or none.
class Ref {
 public:
  Ref() = default;
  static Ref steal(PyObject* object) { return Ref(object); }
  static Ref share(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    PyObject* old = std::exchange(object_, std::exchange(other.object_, nullptr));
    Py_XDECREF(old);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  void clear() { Py_CLEAR(object_); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Ref(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

// The referent of a weak reference, borrowed; null when it is dead. Only valid until Python code runs.
inline PyObject* weak_target(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* target = nullptr;
  if (PyWeakref_GetRef(reference, &target) <= 0) {
    PyErr_Clear();
    return nullptr;
  }
  Py_DECREF(target);  // its owners keep it: no Python code runs before the caller is done with it
  return target;
#else
  PyObject* target = PyWeakref_GET_OBJECT(reference);
  return target == Py_None ? nullptr : target;
#endif
}

// Whether Python code may give the class a method, or take its place as the class of an object. C types lie on the heap,
// too, more of them with each version.
inline bool may_change(PyTypeObject* type) {
  return (type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 && (type->tp_flags & Py_TPFLAGS_IMMUTABLETYPE) == 0;
}

}  // namespace torchdynamo

#include "callable.h"

#include <structmember.h>

#include <cstddef>
#include <memory>

#include "guard_tree.h"
#include "hook.h"

namespace torchdynamo {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Entry: one compiled version of a function, with the guards under which it is right

struct EntryObject {
  PyObject_HEAD
  PyObject* tree;  // a GuardTree, or None: no condition, no inputs
  PyObject* code;
  PyObject* info;  // whatever the driver wants to find again; never read here
  Py_ssize_t hits;
  char takes_closure;
  char comes_last;  // what other entries take, too, they take better
};

PyTypeObject* entry_type = nullptr;

EntryObject* as_entry(PyObject* object) { return reinterpret_cast<EntryObject*>(object); }

int entry_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_entry(self)->tree);
  Py_VISIT(as_entry(self)->code);
  Py_VISIT(as_entry(self)->info);
  return 0;
}

int entry_clear(PyObject* self) {
  Py_CLEAR(as_entry(self)->tree);
  Py_CLEAR(as_entry(self)->code);
  Py_CLEAR(as_entry(self)->info);
  return 0;
}

void entry_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  entry_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* entry_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"tree", "code", "info", "takes_closure", "comes_last", nullptr};
  PyObject *tree, *code, *info = Py_None;
  int takes_closure = 0, comes_last = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|Opp:Entry", const_cast<char**>(names), &tree, &code, &info,
                                   &takes_closure, &comes_last)) {
    return nullptr;
  }
  if (tree != Py_None && !is_tree(tree)) return PyErr_Format(PyExc_TypeError, "Entry: %R is not a GuardTree", tree);
  if (!PyCallable_Check(code)) return PyErr_Format(PyExc_TypeError, "Entry: %R is not callable", code);
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  as_entry(self)->tree = Py_NewRef(tree);
  as_entry(self)->code = Py_NewRef(code);
  as_entry(self)->info = Py_NewRef(info);
  as_entry(self)->takes_closure = static_cast<char>(takes_closure);
  as_entry(self)->comes_last = static_cast<char>(comes_last);
  return self;
}

PyMemberDef entry_members[] = {
    {"tree", T_OBJECT, offsetof(EntryObject, tree), READONLY, "the GuardTree, or None"},
    {"code", T_OBJECT, offsetof(EntryObject, code), READONLY, "called as code(inputs, *flat)"},
    {"info", T_OBJECT, offsetof(EntryObject, info), 0, "the driver's own record"},
    {"hits", T_PYSSIZET, offsetof(EntryObject, hits), 0, "calls that this entry served"},
    {"takes_closure", T_BOOL, offsetof(EntryObject, takes_closure), READONLY, "code(inputs, closure, *flat)"},
    {"comes_last", T_BOOL, offsetof(EntryObject, comes_last), READONLY, "asked behind the others, however often used"},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot entry_slots[] = {
    {Py_tp_doc, const_cast<char*>("Entry(tree, code, info=None, takes_closure=False, comes_last=False)")},
    {Py_tp_new, reinterpret_cast<void*>(entry_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(entry_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(entry_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(entry_clear)},
    {Py_tp_members, entry_members},
    {0, nullptr}};

PyType_Spec entry_spec = {"torchdynamo._C.Entry", sizeof(EntryObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                          entry_slots};

// ---------------------------------------------------------------------------------------------------------------
// CompiledCallable

struct CallableObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* function;
  PyObject* miss;
  PyObject* entries;  // list, most recently used first, those that come last behind them
  PyObject* dict;
  PyObject* weakrefs;
};

PyTypeObject* callable_type = nullptr;

CallableObject* as_callable(PyObject* object) { return reinterpret_cast<CallableObject*>(object); }

// The flat argument vector of one call. Rare arguments (defaults by name, *args, **kwargs) are made here and owned.
class FlatArguments {
 public:
  FlatArguments(PyObject* function, PyObject* const* args, Py_ssize_t positional, PyObject* names)
      : function_(function), code_(reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(function))),
        args_(args), positional_(positional), names_(names) {}

  ~FlatArguments() {
    if (values_ != inline_) PyMem_Free(values_);
  }

  // False without an exception: the call does not fit the signature (CPython itself is to say so).
  bool bind() {
    count_ = flat_size(code_);
    // Two leading slots leave room for what is passed ahead of the arguments without a copy.
    if (count_ + kLead > kInline) {
      values_ = static_cast<PyObject**>(PyMem_Malloc(sizeof(PyObject*) * (count_ + kLead)));
      if (values_ == nullptr) {
        PyErr_NoMemory();
        return false;
      }
    }
    PyObject** flat = this->flat();
    for (Py_ssize_t i = 0; i < count_; i++) flat[i] = nullptr;
    Py_ssize_t taken = positional_ < code_->co_argcount ? positional_ : code_->co_argcount;
    for (Py_ssize_t i = 0; i < taken; i++) flat[i] = args_[i];
    return bind_rest(flat) && bind_names(flat) && bind_defaults(flat);
  }

  PyObject** flat() { return values_ + kLead; }
  Py_ssize_t count() const { return count_; }

  static constexpr Py_ssize_t kLead = 3;  // a scratch slot for the callee, the inputs, the closure

 private:
  static constexpr Py_ssize_t kInline = 24;

  bool bind_rest(PyObject** flat) {
    Py_ssize_t named = code_->co_argcount + code_->co_kwonlyargcount;
    if (code_->co_flags & CO_VARARGS) {
      Py_ssize_t extra = positional_ > code_->co_argcount ? positional_ - code_->co_argcount : 0;
      rest_ = Ref::steal(PyTuple_New(extra));
      if (!rest_) return false;
      for (Py_ssize_t i = 0; i < extra; i++) PyTuple_SET_ITEM(rest_.get(), i, Py_NewRef(args_[code_->co_argcount + i]));
      flat[named++] = rest_.get();
    } else if (positional_ > code_->co_argcount) {
      return false;
    }
    if (code_->co_flags & CO_VARKEYWORDS) {
      keywords_ = Ref::steal(PyDict_New());
      if (!keywords_) return false;
      flat[named] = keywords_.get();
    }
    return true;
  }

  // Slot of the parameter that `name` may set, or -1; -2 with an exception.
  Py_ssize_t parameter(PyObject* name) {
    Py_ssize_t end = code_->co_argcount + code_->co_kwonlyargcount;
    PyObject* const* parameters = reinterpret_cast<PyTupleObject*>(code_->co_localsplusnames)->ob_item;
    for (Py_ssize_t i = code_->co_posonlyargcount; i < end; i++) {
      if (parameters[i] == name) return i;  // both are interned, nearly always
    }
    for (Py_ssize_t i = code_->co_posonlyargcount; i < end; i++) {
      int equal = PyObject_RichCompareBool(name, parameters[i], Py_EQ);
      if (equal != 0) return equal > 0 ? i : -2;
    }
    return -1;
  }

  bool bind_names(PyObject** flat) {
    Py_ssize_t named = names_ != nullptr ? PyTuple_GET_SIZE(names_) : 0;
    for (Py_ssize_t i = 0; i < named; i++) {
      PyObject *name = PyTuple_GET_ITEM(names_, i), *value = args_[positional_ + i];
      if (!PyUnicode_Check(name)) return false;
      Py_ssize_t slot = parameter(name);
      if (slot == -2) return false;
      if (slot >= 0) {
        if (flat[slot] != nullptr) return false;
        flat[slot] = value;
      } else if (!keywords_ || PyDict_SetItem(keywords_.get(), name, value) < 0) {
        return false;
      }
    }
    return true;
  }

  bool bind_defaults(PyObject** flat) {
    PyObject* defaults = PyFunction_GET_DEFAULTS(function_);
    Py_ssize_t given = defaults != nullptr ? PyTuple_GET_SIZE(defaults) : 0;
    for (Py_ssize_t i = 0; i < code_->co_argcount; i++) {
      if (flat[i] != nullptr) continue;
      Py_ssize_t place = i - (code_->co_argcount - given);
      if (place < 0) return false;
      flat[i] = PyTuple_GET_ITEM(defaults, place);
    }
    PyObject* by_name = PyFunction_GET_KW_DEFAULTS(function_);
    for (Py_ssize_t i = code_->co_argcount; i < code_->co_argcount + code_->co_kwonlyargcount; i++) {
      if (flat[i] != nullptr) continue;
      PyObject* name = PyTuple_GET_ITEM(code_->co_localsplusnames, i);
      flat[i] = by_name != nullptr ? PyDict_GetItemWithError(by_name, name) : nullptr;
      if (flat[i] == nullptr) return false;
    }
    if (given > 0) defaults_ = Ref::share(defaults);
    if (by_name != nullptr) named_defaults_ = Ref::share(by_name);
    return true;
  }

  PyObject* function_;
  PyCodeObject* code_;
  PyObject* const* args_;
  Py_ssize_t positional_;
  PyObject* names_;
  Py_ssize_t count_ = 0;
  Ref rest_, keywords_, defaults_, named_defaults_;
  PyObject* inline_[kInline];
  PyObject** values_ = inline_;
};

// Guards may run the program's own attribute methods, whose frames are none of the hook's business.
PyObject* check_unhooked(PyObject* tree, const Scope& scope, Py_ssize_t* failed) {
  HookPause pause;
  return check_tree(tree, scope, failed);
}

// Calls code(inputs, [closure,] *flat).
PyObject* run_entry(EntryObject* entry, PyObject* inputs, PyObject* function, PyObject* const* flat, Py_ssize_t count) {
  constexpr Py_ssize_t kInline = 24;
  PyObject* fixed[kInline];
  PyObject** values = fixed;
  std::unique_ptr<PyObject*[]> heap;
  if (count + 3 > kInline) {
    heap = std::make_unique<PyObject*[]>(count + 3);
    values = heap.get();
  }
  Py_ssize_t next = 1;  // slot 0 is scratch for the callee
  values[next++] = inputs;
  if (entry->takes_closure) {
    PyObject* closure = PyFunction_GET_CLOSURE(function);
    values[next++] = closure != nullptr ? closure : Py_None;
  }
  for (Py_ssize_t i = 0; i < count; i++) values[next++] = flat[i];
  entry->hits++;
  HookPause pause;
  return PyObject_Vectorcall(entry->code, values + 1, static_cast<size_t>(next - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET,
                             nullptr);
}

PyObject* guard_at(EntryObject* entry, Py_ssize_t place) {
  PyObject* guards = tree_guards(entry->tree);
  return place < PyTuple_GET_SIZE(guards) ? PyTuple_GET_ITEM(guards, place) : Py_None;
}

// Asks for a version for a call: miss(callable, flat), or miss(callable, flat, guard) where a guard of the version that
// it has just given for the very call does not hold.
Ref ask(CallableObject* self, PyObject* flat, PyObject* guard) {
  HookPause pause;
  PyObject* args[] = {nullptr, reinterpret_cast<PyObject*>(self), flat, guard};
  Ref miss = Ref::share(self->miss);
  size_t count = guard != nullptr ? 3 : 2;
  return Ref::steal(PyObject_Vectorcall(miss.get(), args + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

bool eager_is_forced = false;  // read and written with the interpreter's lock held

// Whether every call is to run as it was written: this package's own word, or that of torch.compiler.set_stance, which
// is kept by a module that torch loads when it is first called.
bool runs_eagerly() {
  if (eager_is_forced) return true;
  static PyObject* const module_name = PyUnicode_InternFromString("torch._dynamo.eval_frame");
  static PyObject* const record_name = PyUnicode_InternFromString("_stance");
  static PyObject* usual = nullptr;  // the record of the stance by which calls are compiled, as it was seen last
  PyObject* module = PyDict_GetItemWithError(PyImport_GetModuleDict(), module_name);
  if (module == nullptr || !PyModule_Check(module)) return false;
  PyObject* record = PyDict_GetItemWithError(PyModule_GetDict(module), record_name);
  if (record == nullptr || record == usual) return false;
  Ref stance = Ref::steal(PyObject_GetAttrString(record, "stance"));
  if (!stance) {
    PyErr_Clear();
    return false;
  }
  if (PyUnicode_Check(stance.get()) && PyUnicode_CompareWithASCIIString(stance.get(), "force_eager") == 0) return true;
  Py_INCREF(record);
  Py_XSETREF(usual, record);
  return false;
}

PyObject* capture(CallableObject* self, PyObject* function, const Scope& scope, bool* eager) {
  if (self->miss == Py_None) {
    *eager = true;
    return nullptr;
  }
  Ref flat = Ref::steal(PyTuple_New(scope.count));
  if (!flat) return nullptr;
  for (Py_ssize_t i = 0; i < scope.count; i++) PyTuple_SET_ITEM(flat.get(), i, Py_NewRef(scope.flat[i]));
  Ref unheld;
  while (true) {
    Ref entry = ask(self, flat.get(), unheld.get());
    if (!entry) return nullptr;
    if (entry.get() == Py_None) {
      *eager = true;
      return nullptr;
    }
    if (Py_TYPE(entry.get()) != entry_type) {
      return PyErr_Format(PyExc_TypeError, "miss must return an Entry or None, not %R", entry.get());
    }
    EntryObject* record = as_entry(entry.get());
    Py_ssize_t failed = 0;
    Ref inputs = Ref::steal(record->tree == Py_None ? PyList_New(0) : check_unhooked(record->tree, scope, &failed));
    if (inputs) {
      int listed = PySequence_Contains(self->entries, entry.get());
      Py_ssize_t place = record->comes_last ? PyList_GET_SIZE(self->entries) : 0;
      if (listed < 0 || (listed == 0 && PyList_Insert(self->entries, place, entry.get()) < 0)) return nullptr;
      return run_entry(record, inputs.get(), function, scope.flat, scope.count);
    }
    if (PyErr_Occurred()) return nullptr;
    unheld = Ref::share(guard_at(record, failed));
  }
}

PyObject* call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  CallableObject* self = as_callable(object);
  PyObject* function = self->function;
  Ref keep = Ref::share(object);
  FlatArguments bound(function, args, PyVectorcall_NARGS(nargsf), names);
  bool eager = false;
  if (bound.bind()) {
    PyObject* result = dispatch(object, function, bound.flat(), bound.count(), &eager);
    if (!eager) return result;
  } else if (PyErr_Occurred()) {
    return nullptr;
  }
  let_pass(reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(function)));
  return PyObject_Vectorcall(function, args, nargsf & ~PY_VECTORCALL_ARGUMENTS_OFFSET, names);
}

int callable_traverse(PyObject* object, visitproc visit, void* arg) {
  CallableObject* self = as_callable(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->function);
  Py_VISIT(self->miss);
  Py_VISIT(self->entries);
  Py_VISIT(self->dict);
  return 0;
}

int callable_clear(PyObject* object) {
  CallableObject* self = as_callable(object);
  Py_CLEAR(self->function);
  Py_CLEAR(self->miss);
  Py_CLEAR(self->entries);
  Py_CLEAR(self->dict);
  return 0;
}

void callable_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  if (as_callable(object)->weakrefs != nullptr) PyObject_ClearWeakRefs(object);
  callable_clear(object);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// The attributes that functools.wraps copies, and __wrapped__.
int copy_identity(CallableObject* self) {
  static const char* const names[] = {"__module__", "__name__", "__qualname__", "__doc__", "__annotations__"};
  self->dict = PyDict_New();
  if (self->dict == nullptr) return -1;
  PyObject* own = reinterpret_cast<PyFunctionObject*>(self->function)->func_dict;
  if (own != nullptr && PyDict_Update(self->dict, own) < 0) return -1;
  for (const char* name : names) {
    Ref value = Ref::steal(PyObject_GetAttrString(self->function, name));
    if (!value || PyDict_SetItemString(self->dict, name, value.get()) < 0) return -1;
  }
  return PyDict_SetItemString(self->dict, "__wrapped__", self->function);
}

PyObject* callable_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"function", "miss", nullptr};
  PyObject *function, *miss;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:CompiledCallable", const_cast<char**>(names), &function, &miss)) {
    return nullptr;
  }
  if (!PyFunction_Check(function)) {
    return PyErr_Format(PyExc_TypeError, "CompiledCallable: a Python function is needed, not %R", function);
  }
  Ref self = Ref::steal(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  CallableObject* object = as_callable(self.get());
  object->vectorcall = call;
  object->function = Py_NewRef(function);
  object->miss = Py_NewRef(miss);
  object->entries = PyList_New(0);
  if (object->entries == nullptr || copy_identity(object) < 0) return nullptr;
  return self.release();
}

PyObject* callable_get(PyObject* self, PyObject* instance, PyObject*) {
  if (instance == nullptr || instance == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, instance);
}

PyObject* callable_repr(PyObject* self) {
  return PyUnicode_FromFormat("<compiled %R, %zd entries>", as_callable(self)->function,
                              PyList_GET_SIZE(as_callable(self)->entries));
}

// What inspect and others read of a function, straight from it.
PyObject* function_attribute(PyObject* self, void* name) {
  return PyObject_GetAttrString(as_callable(self)->function, static_cast<const char*>(name));
}

PyObject* callable_reduce(PyObject* self, PyObject*) {
  return PyObject_GetAttrString(as_callable(self)->function, "__qualname__");
}

PyMemberDef callable_members[] = {
    {"function", T_OBJECT, offsetof(CallableObject, function), READONLY, "the function as the user wrote it"},
    {"miss", T_OBJECT, offsetof(CallableObject, miss), 0, "called as miss(callable, flat[, guard that did not hold]) when no entry fits"},
    {"entries", T_OBJECT, offsetof(CallableObject, entries), READONLY, "the entries, most recently used first"},
    {"__dictoffset__", T_PYSSIZET, offsetof(CallableObject, dict), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CallableObject, weakrefs), READONLY, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallableObject, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

#define FUNCTION_ATTRIBUTE(name) {name, function_attribute, nullptr, nullptr, const_cast<char*>(name)}
PyGetSetDef callable_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    FUNCTION_ATTRIBUTE("__code__"), FUNCTION_ATTRIBUTE("__defaults__"), FUNCTION_ATTRIBUTE("__kwdefaults__"),
    FUNCTION_ATTRIBUTE("__globals__"), FUNCTION_ATTRIBUTE("__closure__"),
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef callable_methods[] = {
    {"__reduce__", callable_reduce, METH_NOARGS, "pickled by qualified name, as functions are"},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot callable_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(callable_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(callable_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(callable_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(callable_clear)},
    {Py_tp_members, callable_members},
    {Py_tp_getset, callable_getset},
    {Py_tp_methods, callable_methods},
    {Py_tp_descr_get, reinterpret_cast<void*>(callable_get)},
    {Py_tp_repr, reinterpret_cast<void*>(callable_repr)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {0, nullptr}};

PyType_Spec callable_spec = {
    "torchdynamo._C.CompiledCallable", sizeof(CallableObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, callable_slots};

}  // namespace

PyObject* force_eager(PyObject*, PyObject* whether) {
  int truth = PyObject_IsTrue(whether);
  if (truth < 0) return nullptr;
  eager_is_forced = truth != 0;
  Py_RETURN_NONE;
}

bool is_callable(PyObject* object) { return Py_TYPE(object) == callable_type; }

PyObject* callable_function(PyObject* callable) { return as_callable(callable)->function; }

Py_ssize_t flat_size(const PyCodeObject* code) {
  return code->co_argcount + code->co_kwonlyargcount + ((code->co_flags & CO_VARARGS) != 0) +
         ((code->co_flags & CO_VARKEYWORDS) != 0);
}

PyObject* dispatch(PyObject* object, PyObject* function, PyObject* const* flat, Py_ssize_t count, bool* eager) {
  CallableObject* self = as_callable(object);
  if (runs_eagerly()) {
    *eager = true;
    return nullptr;
  }
  Scope scope{flat, count, PyFunction_GET_GLOBALS(function), PyFunction_GET_CLOSURE(function)};
  // A predicate may change the list: its length is read anew, and an entry in use is owned.
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->entries); i++) {
    Ref entry = Ref::share(PyList_GET_ITEM(self->entries, i));
    EntryObject* record = as_entry(entry.get());
    if (Py_TYPE(entry.get()) != entry_type) return PyErr_Format(PyExc_TypeError, "%R is not an Entry", entry.get());
    Py_ssize_t failed = 0;
    Ref inputs = Ref::steal(record->tree == Py_None ? PyList_New(0) : check_unhooked(record->tree, scope, &failed));
    if (!inputs) {
      if (PyErr_Occurred()) return nullptr;
      continue;
    }
    bool moves = i > 0 && !record->comes_last && i < PyList_GET_SIZE(self->entries);
    if (moves && PyList_GET_ITEM(self->entries, i) == entry.get()) {
      PyObject** items = reinterpret_cast<PyListObject*>(self->entries)->ob_item;
      for (Py_ssize_t j = i; j > 0; j--) items[j] = items[j - 1];
      items[0] = entry.get();
    }
    return run_entry(record, inputs.get(), function, flat, count);
  }
  return capture(self, function, scope, eager);
}

PyObject* define_call(PyObject*, PyObject* function) {
  if (!PyFunction_Check(function)) return PyErr_Format(PyExc_TypeError, "define_call: %R is no Python function", function);
  if (PyDict_SetItemString(callable_type->tp_dict, "__call__", function) < 0) return nullptr;
  PyType_Modified(callable_type);
  Py_RETURN_NONE;
}

int add_callable_types(PyObject* module) {
  entry_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&entry_spec));
  callable_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&callable_spec));
  if (entry_type == nullptr || callable_type == nullptr) return -1;
  if (PyModule_AddObjectRef(module, "Entry", reinterpret_cast<PyObject*>(entry_type)) < 0) return -1;
  return PyModule_AddObjectRef(module, "CompiledCallable", reinterpret_cast<PyObject*>(callable_type));
}

}  // namespace torchdynamo

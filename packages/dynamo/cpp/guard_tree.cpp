#include "guard_tree.h"

#include <cmath>
#include <unordered_set>
#include <utility>

#include "constants.h"
#include "guard_nodes.h"

namespace torchdynamo {

// The instance's __dict__ (borrowed), or null. Asks no descriptor and no __getattr__.
PyObject* instance_dict(PyObject* object) {
  if (PyType_Check(object)) {
#if PY_VERSION_HEX >= 0x030C0000
    Ref dict = Ref::steal(PyType_GetDict(reinterpret_cast<PyTypeObject*>(object)));
    return dict.get();
#else
    return reinterpret_cast<PyTypeObject*>(object)->tp_dict;
#endif
  }
  PyObject** place = _PyObject_GetDictPtr(object);
  if (place != nullptr && *place != nullptr) return *place;
#if PY_VERSION_HEX >= 0x030D0000
  if (Py_TYPE(object)->tp_flags & Py_TPFLAGS_INLINE_VALUES) {
    Ref dict = Ref::steal(PyObject_GenericGetDict(object, nullptr));  // made on demand, then owned by the object
    if (!dict) PyErr_Clear();
    return dict.get();
  }
#endif
  return nullptr;
}

PyObject* dict_lookup(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred()) PyErr_Clear();
  return value;
}

PyObject* function_part(PyObject* function, PyObject* name, PyObject*** place) {
  static PyObject* const code = PyUnicode_InternFromString("__code__");
  static PyObject* const defaults = PyUnicode_InternFromString("__defaults__");
  static PyObject* const by_name = PyUnicode_InternFromString("__kwdefaults__");
  PyFunctionObject* parts = reinterpret_cast<PyFunctionObject*>(function);
  if (name == code) *place = &parts->func_code;
  else if (name == defaults) *place = &parts->func_defaults;
  else if (name == by_name) *place = &parts->func_kwdefaults;
  else return nullptr;
  return **place != nullptr ? **place : Py_None;
}

bool is_mro(PyObject* name) {
  static PyObject* const mro = PyUnicode_InternFromString("__mro__");
  return name == mro;
}

namespace {

PyObject* sequence_item(PyObject* const* items, Py_ssize_t size, int64_t index) {
  if (index < 0) index += size;
  return index >= 0 && index < size ? items[index] : nullptr;
}

Py_ssize_t container_length(PyObject* object) {
  if (PyList_Check(object) || PyTuple_Check(object)) return Py_SIZE(object);
  if (PyDict_Check(object)) return PyDict_GET_SIZE(object);
  if (PyAnySet_Check(object)) return PySet_GET_SIZE(object);
  Py_ssize_t length = PyObject_Size(object);
  if (length < 0) PyErr_Clear();
  return length;
}

bool is_container(PyObject* object) {
  return PyList_Check(object) || PyTuple_Check(object) || PyDict_Check(object) || PyAnySet_Check(object);
}

// Not by the class's own `__iter__`.
Ref ordered_keys(PyObject* dict) {
  const Ref iterator = Ref::steal(PyODict_Type.tp_iter(dict));
  return iterator ? Ref::steal(PySequence_Tuple(iterator.get())) : Ref();
}

bool keys_match(PyObject* dict, PyObject* expected) {
  if (!PyDict_Check(dict) || PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(expected)) return false;
  if (PyODict_Check(dict)) {  // its order is its own, not that of the dict beneath
    Ref keys = ordered_keys(dict);
    if (!keys) PyErr_Clear();
    return keys && constants_equal(keys.get(), expected);
  }
  Py_ssize_t position = 0, i = 0;
  PyObject* key;
  while (PyDict_Next(dict, &position, &key, nullptr)) {
    PyObject* wanted = PyTuple_GET_ITEM(expected, i++);
    if (key != wanted && !constants_equal(key, wanted)) return false;
  }
  return true;
}

}  // namespace

bool Tree::run_check(const Check& check, PyObject* value) {
  PyObject* payload = check.payload.get();
  switch (check.kind) {
    case Kind::type:
      return reinterpret_cast<PyObject*>(Py_TYPE(value)) == payload;
    case Kind::identity:
      return value == (check.weak ? weak_target(payload) : payload);
    case Kind::equals:
      return value == payload || constants_equal(value, payload);
    case Kind::length:
      return container_length(value) == check.number;
    case Kind::dict_keys:
      return keys_match(value, payload);
    case Kind::set_items: {
      if (!PyAnySet_Check(value) || PySet_GET_SIZE(value) != PySet_GET_SIZE(payload)) return false;
      PyObject* equal = PyFrozenSet_Type.tp_richcompare(value, payload, Py_EQ);  // a subclass may have its own ==
      if (equal == nullptr) PyErr_Clear();
      Py_XDECREF(equal);
      return equal == Py_True;
    }
    case Kind::instance_has:
    case Kind::instance_lacks: {
      PyObject* dict = instance_dict(value);
      bool present = dict != nullptr && dict_lookup(dict, payload) != nullptr;
      return present == (check.kind == Kind::instance_has);
    }
    case Kind::key_absent:
      if (PyAnySet_Check(value)) return PySet_Contains(value, payload) == 0;
      return PyDict_Check(value) && dict_lookup(value, payload) == nullptr;
    case Kind::truth: {
      Py_ssize_t length = is_container(value) ? container_length(value) : PyObject_IsTrue(value);
      if (length < 0) PyErr_Clear();
      return length >= 0 && (length > 0) == (check.number != 0);
    }
    case Kind::tensor:
      return check.tensor->holds(value);
    case Kind::predicate: {
      Ref answer = Ref::steal(PyObject_CallOneArg(payload, value));
      return answer && PyObject_IsTrue(answer.get()) > 0;
    }
    default:
      return false;
  }
}

// Borrowed from the scope or from the node; null when it is not there.
PyObject* Tree::root(Visit& visit, const Node& node) {
  const Scope& scope = *visit.scope;
  switch (node.access) {
    case Access::argument:
      return node.index < scope.count ? scope.flat[node.index] : nullptr;
    case Access::global:
      return scope.globals != nullptr ? dict_lookup(scope.globals, node.key.get()) : nullptr;
    case Access::module_global: {
      PyObject* modules = PyImport_GetModuleDict();
      PyObject* module = dict_lookup(modules, node.module.get());
      PyObject* dict = module != nullptr ? instance_dict(module) : nullptr;
      return dict != nullptr ? dict_lookup(dict, node.key.get()) : nullptr;
    }
    case Access::closure_cell: {
      if (scope.closure == nullptr || node.index >= PyTuple_GET_SIZE(scope.closure)) return nullptr;
      PyObject* cell = PyTuple_GET_ITEM(scope.closure, node.index);
      return PyCell_Check(cell) ? PyCell_GET(cell) : nullptr;
    }
    default:
      return node.key.get();
  }
}

// Borrowed: from `base`, or kept in the visit. `dict` caches the base's instance dictionary between siblings.
PyObject* Tree::access(Visit& visit, const Node& node, PyObject* base, PyObject*& dict) {
  switch (node.access) {
    case Access::instance_attribute:
      if (dict == nullptr) dict = instance_dict(base);
      return dict != nullptr ? dict_lookup(dict, node.key.get()) : nullptr;
    case Access::attribute: {
      if (PyModule_CheckExact(base)) {
        if (PyObject* value = dict_lookup(PyModule_GetDict(base), node.key.get())) return value;
      }
      if (PyType_Check(base) && is_mro(node.key.get())) return reinterpret_cast<PyTypeObject*>(base)->tp_mro;
      if (PyFunction_Check(base)) {
        PyObject** place;
        if (PyObject* value = function_part(base, node.key.get(), &place)) return value;
      }
      PyObject* value = PyObject_GetAttr(base, node.key.get());
      if (value == nullptr) {
        PyErr_Clear();
        return nullptr;
      }
      visit.kept.push_back(Ref::steal(value));
      return value;
    }
    case Access::instance_dict:
      if (dict == nullptr) dict = instance_dict(base);
      return dict;
    case Access::cell_contents:
      return PyCell_Check(base) ? PyCell_GET(base) : nullptr;
    case Access::item: {
      if (PyDict_Check(base)) return dict_lookup(base, node.key.get());
      if (!PyLong_Check(node.key.get())) return nullptr;
      if (PyTuple_Check(base)) {
        return sequence_item(reinterpret_cast<PyTupleObject*>(base)->ob_item, Py_SIZE(base), node.index);
      }
      if (PyList_Check(base)) {
        return sequence_item(reinterpret_cast<PyListObject*>(base)->ob_item, Py_SIZE(base), node.index);
      }
      PyObject* value = PySequence_Check(base) ? PySequence_GetItem(base, node.index) : nullptr;  // a deque
      if (value == nullptr) {
        PyErr_Clear();
        return nullptr;
      }
      visit.kept.push_back(Ref::steal(value));
      return value;
    }
    case Access::dict_key_at: {
      if (!PyDict_Check(base) || node.index >= PyDict_GET_SIZE(base)) return nullptr;
      if (PyODict_Check(base)) {
        Ref keys = ordered_keys(base);
        if (!keys) {
          PyErr_Clear();
          return nullptr;
        }
        PyObject* key = PyTuple_GET_ITEM(keys.get(), node.index);
        visit.kept.push_back(Ref::share(key));
        return key;
      }
      Py_ssize_t position = 0;
      PyObject* key = nullptr;
      for (int64_t i = 0; i <= node.index; i++) PyDict_Next(base, &position, &key, nullptr);
      return key;
    }
    case Access::type_of:
      return reinterpret_cast<PyObject*>(Py_TYPE(base));
    case Access::referent: {
      if (!PyWeakref_Check(base)) return nullptr;
      PyObject* target = weak_target(base);
      return target != nullptr ? target : Py_None;
    }
    case Access::reading: {
      PyObject* value = PyObject_CallOneArg(node.key.get(), base);
      if (value == nullptr) {
        PyErr_Clear();
        return nullptr;
      }
      visit.kept.push_back(Ref::steal(value));
      return value;
    }
    default:
      return root(visit, node);
  }
}

bool Tree::check_number(Visit& visit, const Node& node, PyObject* base) {
  TensorNumber which = node.access == Access::tensor_size     ? TensorNumber::size
                       : node.access == Access::tensor_stride ? TensorNumber::stride
                                                              : TensorNumber::offset;
  int64_t number = 0;
  if (!read_tensor_number(base, which, node.index, &number)) {
    visit.failed = node.first_guard;
    return false;
  }
  if (node.slot >= 0) visit.numbers[node.slot] = number;
  if (node.checks.empty() && node.inputs.empty()) return true;
  Ref value = Ref::steal(PyLong_FromLongLong(number));
  if (!value) return false;
  for (const Check& check : node.checks) {
    if (!run_check(check, value.get())) {
      visit.failed = check.guard;
      return false;
    }
  }
  for (Py_ssize_t input : node.inputs) PyList_SET_ITEM(visit.inputs, input, Py_NewRef(value.get()));
  return true;
}

bool Tree::check_node(Visit& visit, const Node& node, PyObject* value) {
  for (const Check& check : node.checks) {
    if (!run_check(check, value)) {
      visit.failed = check.guard;
      return false;
    }
  }
  for (Py_ssize_t input : node.inputs) PyList_SET_ITEM(visit.inputs, input, Py_NewRef(value));
  if (node.slot >= 0) {
    visit.objects[node.slot] = value;
    if (node.symbol) {
      int overflow = 1;
      if (PyFloat_CheckExact(value)) {
        visit.numbers[node.slot] = float_bits(PyFloat_AS_DOUBLE(value));
        overflow = 0;
      } else if (PyLong_Check(value)) {
        visit.numbers[node.slot] = PyLong_AsLongLongAndOverflow(value, &overflow);
      }
      if (overflow != 0) {
        visit.failed = node.first_guard;
        return false;
      }
    }
  }
  PyObject* dict = nullptr;
  for (size_t index : node.children) {
    const Node& child = nodes_[index];
    if (is_number_access(child.access)) {
      if (!check_number(visit, child, value)) return false;
      continue;
    }
    PyObject* next = access(visit, child, value, dict);
    if (next == nullptr) {
      visit.failed = child.first_guard;
      return false;
    }
    if (runs_python_) visit.kept.push_back(Ref::share(next));
    if (!check_below(visit, child, next)) return false;
  }
  return true;
}

bool Tree::check_below(Visit& visit, const Node& node, PyObject* value) {
  return node.region >= 0 ? check_region(visit, *regions_[node.region], value) : check_node(visit, node, value);
}

bool Tree::check_relation(Visit& visit, const Relation& relation) {
  const std::vector<int>& slots = relation.slots;
  switch (relation.kind) {
    case Kind::global_state:
      return relation.state->holds();
    case Kind::ambient: {  // ahead of all that is borrowed: it may run Python
      Ref now = Ref::steal(PyObject_CallObject(relation.function.get(), relation.arguments.get()));
      if (!now) PyErr_Clear();
      return now && constants_equal(now.get(), relation.answer.get());
    }
    case Kind::distinct_object:
      return visit.objects[slots[0]] != visit.objects[slots[1]];
    case Kind::same_object:
      return visit.objects[slots[0]] != nullptr && visit.objects[slots[0]] == visit.objects[slots[1]];
    case Kind::all_distinct: {
      std::vector<PyObject*> objects;
      objects.reserve(slots.size());
      for (int slot : slots) objects.push_back(visit.objects[slot]);
      if (objects == relation.distinct) return true;  // different addresses once are so for ever
      std::unordered_set<PyObject*> seen(objects.begin(), objects.end());
      if (seen.size() != objects.size()) return false;
      relation.distinct = std::move(objects);
      return true;
    }
    case Kind::distinct_storage: {
      std::vector<PyObject*> tensors;
      tensors.reserve(slots.size());
      for (int slot : slots) tensors.push_back(visit.objects[slot]);
      return memory_is_disjoint(tensors, relation.written, &relation.memory);
    }
    default:
      return relation.program.holds(visit.numbers);
  }
}

bool Tree::check_root(Visit& visit, const Node& node) {
  PyObject* value = root(visit, node);
  if (value == nullptr) {
    visit.failed = node.first_guard;
    return false;
  }
  if (runs_python_) visit.kept.push_back(Ref::share(value));
  return check_below(visit, node, value);
}

PyObject* Tree::check(const Scope& scope, Py_ssize_t* failed) {
  Visit visit{&scope, nullptr};
  for (const Relation& relation : before_) {
    if (!check_relation(visit, relation)) {
      *failed = relation.guard;
      return nullptr;
    }
  }
  Ref inputs = Ref::steal(PyList_New(input_count_));
  if (!inputs) return nullptr;
  visit.inputs = inputs.get();
  if (slot_count_ > 0) {
    visit.objects.resize(slot_count_);
    visit.numbers.resize(slot_count_);
  }
  bool good = true;
  for (size_t i = 0; good && i < roots_.size(); i++) good = check_root(visit, nodes_[roots_[i]]);
  if (!good || (steady_ != nullptr && !check_region(visit, *steady_, nullptr))) {
    *failed = visit.failed;
    return nullptr;
  }
  for (const Relation& relation : after_) {
    if (!check_relation(visit, relation)) {
      *failed = relation.guard;
      return nullptr;
    }
  }
  return inputs.release();
}

int Tree::traverse(visitproc visit, void* arg) {
  Py_VISIT(guards_.get());
  Py_VISIT(inputs_.get());
  for (const Node& node : nodes_) {
    Py_VISIT(node.key.get());
    for (const Check& check : node.checks) Py_VISIT(check.payload.get());
  }
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// The Python type

namespace {

struct TreeObject {
  PyObject_HEAD
  Tree* tree;
  PyObject* function;  // whose globals and closure `check` reads when called from Python
};

PyTypeObject* tree_type = nullptr;

TreeObject* as_tree(PyObject* object) { return reinterpret_cast<TreeObject*>(object); }

int tree_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_tree(self)->function);
  return as_tree(self)->tree != nullptr ? as_tree(self)->tree->traverse(visit, arg) : 0;
}

int tree_clear(PyObject* self) {
  Py_CLEAR(as_tree(self)->function);
  delete std::exchange(as_tree(self)->tree, nullptr);
  return 0;
}

void tree_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  tree_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* tree_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"guards", "inputs", "function", "pinned", nullptr};
  PyObject *guards, *inputs, *function = Py_None, *pinned = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OO:GuardTree", const_cast<char**>(names), &guards, &inputs,
                                   &function, &pinned)) {
    return nullptr;
  }
  if (function != Py_None && !PyFunction_Check(function)) {
    return PyErr_Format(PyExc_TypeError, "GuardTree: function must be a Python function, not %R", function);
  }
  Ref self = Ref::steal(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  as_tree(self.get())->function = Py_NewRef(function);
  as_tree(self.get())->tree = new Tree();
  if (!as_tree(self.get())->tree->build(guards, inputs, pinned)) return nullptr;
  return self.release();
}

Scope scope_of(PyObject* function, PyObject* flat) {
  bool real = PyFunction_Check(function);
  return {reinterpret_cast<PyTupleObject*>(flat)->ob_item, PyTuple_GET_SIZE(flat),
          real ? PyFunction_GET_GLOBALS(function) : nullptr, real ? PyFunction_GET_CLOSURE(function) : nullptr};
}

PyObject* tree_check_method(PyObject* self, PyObject* flat) {
  Ref values = Ref::steal(PySequence_Tuple(flat));
  if (!values) return nullptr;
  Py_ssize_t failed = 0;
  PyObject* inputs = check_tree(self, scope_of(as_tree(self)->function, values.get()), &failed);
  if (inputs == nullptr && !PyErr_Occurred()) Py_RETURN_NONE;
  return inputs;
}

PyObject* tree_explain_method(PyObject* self, PyObject* flat) {
  Ref values = Ref::steal(PySequence_Tuple(flat));
  if (!values) return nullptr;
  Py_ssize_t failed = 0;
  Ref inputs = Ref::steal(check_tree(self, scope_of(as_tree(self)->function, values.get()), &failed));
  if (inputs) Py_RETURN_NONE;
  return PyErr_Occurred() ? nullptr : PyLong_FromSsize_t(failed);
}

PyObject* get_guards(PyObject* self, void*) { return Py_NewRef(as_tree(self)->tree->guards()); }
PyObject* get_inputs(PyObject* self, void*) { return Py_NewRef(as_tree(self)->tree->inputs()); }

PyMethodDef tree_methods[] = {
    {"check", tree_check_method, METH_O,
     "check(flat) -> list | None\n\nThe inputs when every guard holds for the flat argument vector, else None."},
    {"explain", tree_explain_method, METH_O,
     "explain(flat) -> int | None\n\nIndex of the first guard that fails, None when all hold; len(guards) + i when "
     "input i cannot be read."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef tree_getset[] = {{"guards", get_guards, nullptr, "the guard records, in order", nullptr},
                             {"inputs", get_inputs, nullptr, "the sources of the inputs, in order", nullptr},
                             {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot tree_slots[] = {
    {Py_tp_doc, const_cast<char*>("GuardTree(guards, inputs, function=None, pinned=())\n\nChecks guards and collects "
                                  "inputs in one traversal of their sources.")},
    {Py_tp_new, reinterpret_cast<void*>(tree_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(tree_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(tree_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(tree_clear)},
    {Py_tp_methods, tree_methods},
    {Py_tp_getset, tree_getset},
    {0, nullptr}};

PyType_Spec tree_spec = {"torchdynamo._C.GuardTree", sizeof(TreeObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tree_slots};

}  // namespace

PyObject* check_tree(PyObject* self, const Scope& scope, Py_ssize_t* failed) {
  Tree* tree = as_tree(self)->tree;
  if (tree == nullptr) return nullptr;
  PyObject* inputs = tree->check(scope, failed);
  return inputs;
}

bool is_tree(PyObject* object) { return Py_TYPE(object) == tree_type; }

PyObject* tree_guards(PyObject* tree) { return as_tree(tree)->tree->guards(); }

int add_guard_tree_type(PyObject* module) {
  tree_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&tree_spec));
  if (tree_type == nullptr) return -1;
  return PyModule_AddObjectRef(module, "GuardTree", reinterpret_cast<PyObject*>(tree_type));
}

}  // namespace torchdynamo

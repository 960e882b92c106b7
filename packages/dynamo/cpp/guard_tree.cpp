#include "guard_tree.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "constants.h"
#include "shape_program.h"
#include "tensor_guard.h"

namespace torchdynamo {
namespace {

enum class Access {
  argument, global, module_global, closure_cell, pinned,  // roots
  attribute, instance_attribute, instance_dict, cell_contents, item, dict_key_at, type_of,
  tensor_size, tensor_stride, tensor_offset,  // integers, read without making a Python object
};

enum class Kind {
  type, identity, equals, length, dict_keys, set_items, instance_has, instance_lacks, key_absent, truth, tensor, predicate,
  same_object, distinct_storage, shape, global_state,  // of the whole call, not of one object
};

struct Check {
  Kind kind;
  Py_ssize_t guard;
  Ref payload;
  int64_t number = 0;
  bool weak = false;
  std::unique_ptr<TensorCheck> tensor;
};

// One source. `key` is what its access needs: a name, a constant key, a pinned object.
struct Node {
  Access access;
  Ref key, module;
  int64_t index = 0;
  Py_ssize_t first_guard = 0;
  int slot = -1;
  int replay = -1;  // of the anchors
  bool symbol = false;  // a shape program reads it: it must be an integer of 64 bits
  std::vector<Py_ssize_t> inputs;
  std::vector<Check> checks;
  std::vector<size_t> children;
};

// A guard on several sources; `slots` are theirs.
struct Relation {
  Kind kind;
  Py_ssize_t guard;
  std::vector<int> slots;
  ShapeProgram program;
  std::unique_ptr<StateCheck> state;
};

// One step of a replay. A traversal that succeeded leaves a list of these; while nothing it read has been written to,
// the list gives the same verdict and the same objects without looking anything up.
struct Step {
  enum class Kind { instance, dict, type, tensor, number, collect, remember, subtree } kind;
  PyObject* object;          // borrowed: alive as long as the steps before it hold
  PyObject* expected;        // its dictionary, or its type
  PyObject** place;          // where the instance keeps its dictionary
  uint64_t version;          // of the dictionary
  const TensorCheck* check;
  const Node* node;
  Py_ssize_t index;          // of the input, or of the slot
};

// The replay of everything below one node, its anchor, as last seen. `attempts` and `successes` stop it where the
// anchor changes at every call and recording would be wasted.
struct Replay {
  PyObject* anchor = nullptr;
  PyTypeObject* anchor_type = nullptr;
  std::vector<Step> steps;
  std::vector<Py_ssize_t> inputs;  // all that are below the anchor
  bool valid = false, busy = false;
  int attempts = 0, successes = 0;
};

// What one traversal gathers: the objects and integers that relations speak of, and the inputs.
struct Visit {
  const Scope* scope;
  PyObject* inputs;
  Py_ssize_t failed = 0;
  std::vector<PyObject*> objects;  // by slot, borrowed
  std::vector<int64_t> numbers;    // by slot
  std::vector<Ref> kept;           // results of accesses that made a reference, alive until the end
};

bool is_number_access(Access access) { return access >= Access::tensor_size; }

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

bool keys_match(PyObject* dict, PyObject* expected) {
  if (!PyDict_Check(dict) || PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(expected)) return false;
  if (PyODict_Check(dict)) {  // its order is its own, not that of the dict beneath
    Ref keys = Ref::steal(PySequence_Tuple(dict));
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

// ---------------------------------------------------------------------------------------------------------------
// Checking

class Tree {
 public:
  bool build(PyObject* guards, PyObject* inputs, PyObject* pinned);
  PyObject* check(const Scope& scope, Py_ssize_t* failed);
  int traverse(visitproc visit, void* arg);

  PyObject* guards() const { return guards_.get(); }
  PyObject* inputs() const { return inputs_.get(); }

 private:
  friend class Builder;
  PyObject* access(Visit& visit, const Node& node, PyObject* base, PyObject*& dict);
  PyObject* root(Visit& visit, const Node& node);
  bool check_node(Visit& visit, const Node& node, PyObject* value);
  bool check_number(Visit& visit, const Node& node, PyObject* base);
  bool run_check(const Check& check, PyObject* value);
  bool check_relation(Visit& visit, const Relation& relation);
  size_t survey(const Node& node, std::vector<Py_ssize_t>& inputs) const;
  bool record_node(std::vector<Step>& steps, const Node& node, PyObject* value, bool anchor);
  bool replay(Visit& visit, const Replay& record);
  bool check_root(Visit& visit, const Node& node);
  bool check_anchor(Visit& visit, const Node& node, PyObject* value);
  void place_anchor(Node& node);

  Ref guards_, inputs_;
  std::vector<Node> nodes_;
  std::vector<size_t> roots_;
  std::vector<std::unique_ptr<Replay>> replays_;  // by `Node::replay`
  std::vector<Relation> before_, after_;  // ambient state first, relations between objects at the end
  Py_ssize_t input_count_ = 0;
  int slot_count_ = 0;
  bool runs_python_ = false;  // then every visited object is kept alive
};

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
      int equal = PyObject_RichCompareBool(value, payload, Py_EQ);
      if (equal < 0) PyErr_Clear();
      return equal > 0;
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
        Ref keys = Ref::steal(PySequence_Tuple(base));
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
      if (PyLong_Check(value)) visit.numbers[node.slot] = PyLong_AsLongLongAndOverflow(value, &overflow);
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
    if (child.replay >= 0 ? !check_anchor(visit, child, next) : !check_node(visit, child, next)) return false;
  }
  return true;
}

bool Tree::check_relation(Visit& visit, const Relation& relation) {
  const std::vector<int>& slots = relation.slots;
  switch (relation.kind) {
    case Kind::global_state:
      return relation.state->holds();
    case Kind::same_object:
      return visit.objects[slots[0]] != nullptr && visit.objects[slots[0]] == visit.objects[slots[1]];
    case Kind::distinct_storage: {
      std::vector<PyObject*> tensors;
      for (int slot : slots) tensors.push_back(visit.objects[slot]);
      return memory_is_disjoint(tensors);
    }
    default:
      return relation.program.holds(visit.numbers);
  }
}

#if PY_VERSION_HEX < 0x030D0000
constexpr bool kDictsHaveVersions = true;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
uint64_t dict_version(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag; }
#pragma GCC diagnostic pop
#else
constexpr bool kDictsHaveVersions = false;
uint64_t dict_version(PyObject*) { return 0; }
#endif

// Whether an object of this exact type never changes, whatever code runs.
bool is_frozen_type(PyTypeObject* type) {
  return type == &PyLong_Type || type == &PyBool_Type || type == &PyFloat_Type || type == &PyUnicode_Type ||
         type == &PyBytes_Type || type == &PyComplex_Type || type == Py_TYPE(Py_None);
}

// Number of nodes below `node`, itself included; their inputs are added to `inputs`.
size_t Tree::survey(const Node& node, std::vector<Py_ssize_t>& inputs) const {
  size_t size = 1;
  inputs.insert(inputs.end(), node.inputs.begin(), node.inputs.end());
  for (size_t child : node.children) size += survey(nodes_[child], inputs);
  return size;
}

// Appends what must be looked at again to trust that `node`, which held `value` when all its guards did, still does.
// False: this node's guards cannot be told from versions, nor those below it; the caller checks it in full.
// The anchor itself is known by its address alone, which another object may have taken over: what is not read through
// a version or a type there proves nothing.
bool Tree::record_node(std::vector<Step>& steps, const Node& node, PyObject* value, bool anchor) {
  bool needs_instance = false, needs_dict = false, needs_type = false;
  for (const Check& check : node.checks) {
    switch (check.kind) {
      case Kind::identity:
        if (anchor) return false;
        break;
      case Kind::type:
        needs_type = true;
        break;
      case Kind::tensor:
        steps.push_back({Step::Kind::tensor, value, nullptr, nullptr, 0, check.tensor.get(), &node, 0});
        break;
      case Kind::equals:
        if (anchor || !is_frozen_type(Py_TYPE(value))) return false;
        break;
      case Kind::length:
      case Kind::dict_keys:
      case Kind::key_absent:
      case Kind::truth:
        if (PyDict_CheckExact(value)) {
          needs_dict = true;
        } else if (anchor || !is_frozen_type(Py_TYPE(value))) {
          return false;
        }
        break;
      case Kind::instance_has:
      case Kind::instance_lacks:
        needs_instance = true;
        break;
      default:
        return false;
    }
  }
  for (size_t index : node.children) {
    Access access = nodes_[index].access;
    if (access == Access::instance_attribute || access == Access::instance_dict) {
      needs_instance = true;
    } else if (access == Access::item && PyDict_CheckExact(value)) {
      needs_dict = true;
    } else if (access == Access::type_of) {
      needs_type = true;
    } else if (!is_number_access(access) && (anchor || access != Access::item || !PyTuple_CheckExact(value))) {
      return false;
    }
  }
  PyObject* dict = nullptr;
  if (needs_instance) {
    PyObject** place = PyType_Check(value) ? nullptr : _PyObject_GetDictPtr(value);
    if (place == nullptr || *place == nullptr) return false;
    dict = *place;
    steps.push_back({Step::Kind::instance, value, dict, place, dict_version(dict), nullptr, &node, 0});
  }
  if (needs_instance || needs_type) {
    // Ahead of the dictionary: the place of the dictionary is a matter of the type.
    Step step{Step::Kind::type, value, reinterpret_cast<PyObject*>(Py_TYPE(value)), nullptr, 0, nullptr, &node, 0};
    steps.insert(needs_instance ? steps.end() - 1 : steps.end(), step);
  }
  if (needs_dict) steps.push_back({Step::Kind::dict, value, nullptr, nullptr, dict_version(value), nullptr, &node, 0});
  for (Py_ssize_t input : node.inputs) steps.push_back({Step::Kind::collect, value, nullptr, nullptr, 0, nullptr, &node, input});
  if (node.slot >= 0) {
    if (node.symbol) return false;
    steps.push_back({Step::Kind::remember, value, nullptr, nullptr, 0, nullptr, &node, node.slot});
  }
  Visit unused{nullptr, nullptr};
  for (size_t index : node.children) {
    const Node& child = nodes_[index];
    if (is_number_access(child.access)) {
      steps.push_back({Step::Kind::number, value, nullptr, nullptr, 0, nullptr, &child, 0});
      continue;
    }
    PyObject* next = access(unused, child, value, dict);
    if (next == nullptr) return false;
    size_t before = steps.size();
    if (!record_node(steps, child, next, false)) {
      steps.resize(before);
      steps.push_back({Step::Kind::subtree, next, nullptr, nullptr, 0, nullptr, &child, 0});
    }
  }
  return true;
}

// False: something was written to, or a guard that is asked every time fails. A full traversal says which.
bool Tree::replay(Visit& visit, const Replay& record) {
  for (const Step& step : record.steps) {
    switch (step.kind) {
      case Step::Kind::type:
        if (reinterpret_cast<PyObject*>(Py_TYPE(step.object)) != step.expected) return false;
        break;
      case Step::Kind::instance:
        if (*step.place != step.expected || dict_version(step.expected) != step.version) return false;
        break;
      case Step::Kind::dict:
        if (dict_version(step.object) != step.version) return false;
        break;
      case Step::Kind::tensor:
        if (!step.check->holds(step.object)) return false;
        break;
      case Step::Kind::number:
        if (!check_number(visit, *step.node, step.object)) return false;
        break;
      case Step::Kind::collect:
        PyList_SET_ITEM(visit.inputs, step.index, Py_NewRef(step.object));
        break;
      case Step::Kind::remember:
        visit.objects[step.index] = step.object;
        break;
      case Step::Kind::subtree:
        if (!check_node(visit, *step.node, step.object)) return false;
        break;
    }
  }
  return true;
}

bool Tree::check_anchor(Visit& visit, const Node& node, PyObject* value) {
  Replay& record = *replays_[node.replay];
  // Making an instance's dictionary may start a collection, whose finalizers may call this very function.
  if (record.busy) return check_node(visit, node, value);
  record.busy = true;
  bool sure = record.valid && record.anchor == value && record.anchor_type == Py_TYPE(value);
  bool good = sure && replay(visit, record);
  if (PyErr_Occurred()) {
    record.busy = false;
    return false;
  }
  if (good) {
    record.successes++;
  } else {
    if (sure) {  // what the replay collected is collected anew
      for (Py_ssize_t input : record.inputs) Py_CLEAR(reinterpret_cast<PyListObject*>(visit.inputs)->ob_item[input]);
    }
    constexpr int kPatience = 16;
    record.valid = false;
    good = check_node(visit, node, value);
    if (good && (record.attempts < kPatience || record.successes > record.attempts)) {
      record.attempts++;
      record.steps.clear();
      record.anchor = value;
      record.anchor_type = Py_TYPE(value);
      record.valid = record_node(record.steps, node, value, true);
    }
  }
  record.busy = false;
  return good;
}

bool Tree::check_root(Visit& visit, const Node& node) {
  PyObject* value = root(visit, node);
  if (value == nullptr) {
    visit.failed = node.first_guard;
    return false;
  }
  if (runs_python_) visit.kept.push_back(Ref::share(value));
  return node.replay >= 0 ? check_anchor(visit, node, value) : check_node(visit, node, value);
}

// Anchors are the topmost large nodes that are read through an instance's dictionary; items of an argument tuple, which
// is a new object at each call, are anchored one by one.
void Tree::place_anchor(Node& node) {
  constexpr size_t kWorthwhile = 6;
  auto replay = std::make_unique<Replay>();
  if (survey(node, replay->inputs) < kWorthwhile) return;
  bool by_instance = false;
  for (size_t child : node.children) {
    Access access = nodes_[child].access;
    by_instance |= access == Access::instance_attribute || access == Access::instance_dict;
  }
  if (by_instance) {
    node.replay = static_cast<int>(replays_.size());
    replays_.push_back(std::move(replay));
    return;
  }
  for (size_t child : node.children) {
    if (!is_number_access(nodes_[child].access)) place_anchor(nodes_[child]);
  }
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
  for (size_t index : roots_) {
    if (!check_root(visit, nodes_[index])) {
      *failed = visit.failed;
      return nullptr;
    }
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
// Building

class Builder {
 public:
  Builder(Tree& tree, PyObject* pinned) : tree_(tree), pinned_(pinned), known_(Ref::steal(PyDict_New())) {}

  bool add_guard(PyObject* guard, Py_ssize_t number);
  bool add_input(PyObject* source, Py_ssize_t number) {
    guard_ = PyTuple_GET_SIZE(tree_.guards()) + number;
    Py_ssize_t node = node_of(source);
    if (node < 0) return false;
    tree_.nodes_[node].inputs.push_back(number);
    return true;
  }

 private:
  Py_ssize_t node_of(PyObject* source);
  bool read_source(PyObject* source, Node& node, bool* has_base);
  bool read_pinned(Node& node, PyObject* key);
  bool read_check(Kind kind, PyObject* payload, Check& check);
  bool add_relation(Kind kind, PyObject* source, PyObject* payload);
  int slot_of(PyObject* source);

  Tree& tree_;
  PyObject* pinned_;
  Ref known_;  // (parent, access, key, module) -> node
  std::unordered_map<PyObject*, Py_ssize_t> seen_;  // source record by address -> node; the records outlive the builder
  Py_ssize_t guard_ = 0;
};

const std::unordered_map<std::string, Access>& access_names() {
  static const std::unordered_map<std::string, Access> names = {
      {"Argument", Access::argument},       {"Global", Access::global},
      {"ClosureCell", Access::closure_cell}, {"Pinned", Access::pinned},
      {"Attribute", Access::attribute},     {"InstanceAttribute", Access::instance_attribute},
      {"InstanceDict", Access::instance_dict}, {"CellContents", Access::cell_contents},
      {"Item", Access::item},               {"DictKeyAt", Access::dict_key_at},
      {"TypeOf", Access::type_of},          {"TensorSize", Access::tensor_size},
      {"TensorStride", Access::tensor_stride}, {"TensorOffset", Access::tensor_offset},
  };
  return names;
}

const std::unordered_map<std::string, Kind>& kind_names() {
  static const std::unordered_map<std::string, Kind> names = {
      {"type", Kind::type},           {"identity", Kind::identity},
      {"equals", Kind::equals},       {"length", Kind::length},
      {"dict_keys", Kind::dict_keys}, {"set_items", Kind::set_items},
      {"instance_has", Kind::instance_has}, {"instance_lacks", Kind::instance_lacks},
      {"key_absent", Kind::key_absent}, {"bool", Kind::truth},
      {"tensor", Kind::tensor},       {"same_object", Kind::same_object},
      {"distinct_storage", Kind::distinct_storage}, {"shape", Kind::shape},
      {"global_state", Kind::global_state}, {"predicate", Kind::predicate},
  };
  return names;
}

bool read_index(PyObject* source, const char* name, int64_t* out) {
  Ref value = Ref::steal(PyObject_GetAttrString(source, name));
  *out = value ? PyLong_AsLongLong(value.get()) : 0;
  return !PyErr_Occurred();
}

bool Builder::read_pinned(Node& node, PyObject* key) {
  node.key = Ref::steal(pinned_ != nullptr ? PyObject_GetItem(pinned_, key) : nullptr);
  if (!node.key && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a Pinned source, but no pinned objects");
  return static_cast<bool>(node.key);
}

bool Builder::read_source(PyObject* source, Node& node, bool* has_base) {
  const char* name = Py_TYPE(source)->tp_name;
  const char* dot = std::strrchr(name, '.');
  auto found = access_names().find(dot != nullptr ? dot + 1 : name);
  if (found == access_names().end()) {
    PyErr_Format(PyExc_TypeError, "GuardTree: %R is not a source", source);
    return false;
  }
  node.access = found->second;
  *has_base = node.access >= Access::attribute;
  switch (node.access) {
    case Access::argument:
    case Access::closure_cell:
    case Access::dict_key_at:
      return read_index(source, "index", &node.index);
    case Access::tensor_size:
    case Access::tensor_stride:
      return read_index(source, "dim", &node.index);
    case Access::global:
      node.module = Ref::steal(PyObject_GetAttrString(source, "module"));
      if (node.module && node.module.get() != Py_None) node.access = Access::module_global;
      [[fallthrough]];
    case Access::attribute:
    case Access::instance_attribute: {
      if (node.access == Access::attribute) {
        Ref native = Ref::steal(PyObject_GetAttrString(source, "native"));
        if (!native) return false;
        tree_.runs_python_ |= native.get() != Py_True;
      }
      PyObject* key = PyObject_GetAttrString(source, "name");
      if (key != nullptr) PyUnicode_InternInPlace(&key);
      node.key = Ref::steal(key);
      return static_cast<bool>(node.key);
    }
    case Access::item:
      node.key = Ref::steal(PyObject_GetAttrString(source, "key"));
      if (node.key && PyLong_Check(node.key.get())) {
        int overflow = 0;
        node.index = PyLong_AsLongLongAndOverflow(node.key.get(), &overflow);
      }
      return static_cast<bool>(node.key);
    case Access::pinned: {
      Ref key = Ref::steal(PyObject_GetAttrString(source, "key"));
      return key && read_pinned(node, key.get());
    }
    default:
      return true;
  }
}

Py_ssize_t Builder::node_of(PyObject* source) {
  if (auto seen = seen_.find(source); seen != seen_.end()) return seen->second;
  Node node{};
  bool has_base = false;
  if (!read_source(source, node, &has_base)) return -1;
  Py_ssize_t parent = -1;
  if (has_base) {
    Ref base = Ref::steal(PyObject_GetAttrString(source, "base"));
    parent = base ? node_of(base.get()) : -1;
    if (parent < 0) return -1;
  }
  // A pinned object need not be hashable: its address stands for it.
  Ref id = node.access == Access::pinned ? Ref::steal(PyLong_FromVoidPtr(node.key.get()))
                                         : Ref::share(node.key ? node.key.get() : Py_None);
  Ref key = Ref::steal(Py_BuildValue("(niLOO)", parent, static_cast<int>(node.access), static_cast<long long>(node.index),
                                     id.get(), node.module ? node.module.get() : Py_None));
  if (!key) return -1;
  PyObject* known = PyDict_GetItemWithError(known_.get(), key.get());
  if (known == nullptr && PyErr_Occurred()) return -1;
  Py_ssize_t index;
  if (known != nullptr) {
    index = PyLong_AsSsize_t(known);
  } else {
    index = static_cast<Py_ssize_t>(tree_.nodes_.size());
    node.first_guard = guard_;
    if (parent >= 0) {
      Access above = tree_.nodes_[parent].access;
      if (is_number_access(above)) {
        PyErr_Format(PyExc_ValueError, "GuardTree: %R reads through an integer", source);
        return -1;
      }
      tree_.nodes_[parent].children.push_back(index);
    } else {
      tree_.roots_.push_back(index);
    }
    tree_.nodes_.push_back(std::move(node));
    Ref number = Ref::steal(PyLong_FromSsize_t(index));
    if (!number || PyDict_SetItem(known_.get(), key.get(), number.get()) < 0) return -1;
  }
  seen_.emplace(source, index);
  return index;
}

int Builder::slot_of(PyObject* source) {
  Py_ssize_t index = node_of(source);
  if (index < 0) return -1;
  Node& node = tree_.nodes_[index];
  if (node.slot < 0) node.slot = tree_.slot_count_++;
  return node.slot;
}

bool Builder::read_check(Kind kind, PyObject* payload, Check& check) {
  switch (kind) {
    case Kind::identity: {
      Ref weak = Ref::steal(PyWeakref_NewRef(payload, nullptr));
      check.weak = static_cast<bool>(weak);
      if (!weak) PyErr_Clear();  // None, an int, a builtin: kept strongly
      check.payload = weak ? std::move(weak) : Ref::share(payload);
      return true;
    }
    case Kind::length:
      check.number = PyLong_AsLongLong(payload);
      return !PyErr_Occurred();
    case Kind::truth:
      check.number = PyObject_IsTrue(payload);
      return check.number >= 0;
    case Kind::tensor:
      check.tensor = make_tensor_check(payload);
      return check.tensor != nullptr;
    case Kind::dict_keys:
      check.payload = Ref::steal(PySequence_Tuple(payload));
      return static_cast<bool>(check.payload);
    case Kind::set_items:
      check.payload = Ref::steal(PyFrozenSet_New(payload));
      return static_cast<bool>(check.payload);
    case Kind::equals: {
      richcmpfunc compare = Py_TYPE(payload)->tp_richcompare;
      bool own = (Py_TYPE(payload)->tp_flags & Py_TPFLAGS_HEAPTYPE) && compare != PyBaseObject_Type.tp_richcompare;
      tree_.runs_python_ |= own && !PyTuple_Check(payload);
      check.payload = Ref::share(payload);
      return true;
    }
    case Kind::predicate:
      tree_.runs_python_ = true;
      [[fallthrough]];
    default:
      check.payload = Ref::share(payload);
      return true;
  }
}

bool Builder::add_relation(Kind kind, PyObject* source, PyObject* payload) {
  Relation relation{};
  relation.kind = kind;
  relation.guard = guard_;
  if (kind == Kind::global_state) {
    relation.state = make_state_check(payload);
    if (relation.state == nullptr) return false;
    tree_.before_.push_back(std::move(relation));
    return true;
  }
  if (kind == Kind::shape) {
    auto slot = [this](PyObject* symbol) {
      int number = slot_of(symbol);
      if (number >= 0) tree_.nodes_[node_of(symbol)].symbol = true;
      return number;
    };
    if (!relation.program.read(payload, slot)) return false;
  } else {
    Ref others = kind == Kind::same_object ? Ref::steal(PyTuple_Pack(1, payload)) : Ref::steal(PySequence_Tuple(payload));
    if (!others) return false;
    relation.slots.push_back(slot_of(source));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(others.get()); i++) {
      int slot = slot_of(PyTuple_GET_ITEM(others.get(), i));
      bool own = kind == Kind::distinct_storage && slot == relation.slots[0];
      if (!own) relation.slots.push_back(slot);
    }
    for (int slot : relation.slots) {
      if (slot < 0) return false;
    }
  }
  tree_.after_.push_back(std::move(relation));
  return true;
}

bool Builder::add_guard(PyObject* guard, Py_ssize_t number) {
  guard_ = number;
  Ref source = Ref::steal(PyObject_GetAttrString(guard, "source"));
  Ref kind_record = source ? Ref::steal(PyObject_GetAttrString(guard, "kind")) : Ref();
  Ref kind_value = kind_record ? Ref::steal(PyObject_GetAttrString(kind_record.get(), "value")) : Ref();
  Ref payload = kind_value ? Ref::steal(PyObject_GetAttrString(guard, "payload")) : Ref();
  const char* name = payload ? PyUnicode_AsUTF8(kind_value.get()) : nullptr;
  if (name == nullptr) return false;
  auto found = kind_names().find(name);
  if (found == kind_names().end()) {
    PyErr_Format(PyExc_ValueError, "GuardTree: unknown guard kind %s", name);
    return false;
  }
  Kind kind = found->second;
  if (kind >= Kind::same_object) return add_relation(kind, source.get(), payload.get());
  Py_ssize_t node = node_of(source.get());
  if (node < 0) return false;
  Check check{};
  check.kind = kind;
  check.guard = number;
  if (!read_check(kind, payload.get(), check)) return false;
  tree_.nodes_[node].checks.push_back(std::move(check));
  return true;
}

bool Tree::build(PyObject* guards, PyObject* inputs, PyObject* pinned) {
  guards_ = Ref::steal(PySequence_Tuple(guards));
  inputs_ = guards_ ? Ref::steal(PySequence_Tuple(inputs)) : Ref();
  if (!inputs_) return false;
  input_count_ = PyTuple_GET_SIZE(inputs_.get());
  Builder builder(*this, pinned);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guards_.get()); i++) {
    if (!builder.add_guard(PyTuple_GET_ITEM(guards_.get(), i), i)) return false;
  }
  for (Py_ssize_t i = 0; i < input_count_; i++) {
    if (!builder.add_input(PyTuple_GET_ITEM(inputs_.get(), i), i)) return false;
  }
  if (kDictsHaveVersions && !runs_python_) {
    for (size_t index : roots_) place_anchor(nodes_[index]);
  }
  return true;
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

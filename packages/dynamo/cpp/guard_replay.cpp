// Replays: while nothing that a traversal read has been written to, its verdict is given without looking anything up.
#include "guard_nodes.h"

namespace torchdynamo {
namespace {

#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
uint64_t dict_version(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag; }
#pragma GCC diagnostic pop
#else
uint64_t dict_version(PyObject*) { return 0; }
#endif

// The tag under which the interpreter caches lookups in a class; 0 after a write to the class or its bases.
unsigned int class_tag(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030C0000
  if (!(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)) return 0;
#endif
  return type->tp_version_tag;
}

unsigned int assigned_class_tag(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030C0000
  static PyObject* any_name = PyUnicode_InternFromString("__name__");
  _PyType_Lookup(type, any_name);  // a lookup gives the class a tag
#else
  PyUnstable_Type_AssignVersionTag(type);
#endif
  return class_tag(type);
}

// Whether an object of this exact type never changes, whatever code runs.
bool is_frozen_type(PyTypeObject* type) {
  return type == &PyLong_Type || type == &PyBool_Type || type == &PyFloat_Type || type == &PyUnicode_Type ||
         type == &PyBytes_Type || type == &PyComplex_Type || type == Py_TYPE(Py_None);
}

}  // namespace

// Whether all that is checked of a pinned class are entries of its own dictionary, by identity or as constants. Writes to
// a class go through its metaclass, which takes the version tag away.
bool Tree::follows_from_class(const Node& node) const {
  if (node.access != Access::pinned || !PyType_Check(node.key.get()) || node.slot >= 0 || !node.inputs.empty()) return false;
  for (const Check& check : node.checks) {
    if (check.kind != Kind::instance_has && check.kind != Kind::instance_lacks) return false;
  }
  for (size_t index : node.children) {
    const Node& child = nodes_[index];
    bool leaf = child.access == Access::instance_attribute && child.children.empty() && child.inputs.empty();
    if (!leaf || child.slot >= 0) return false;
    for (const Check& check : child.checks) {
      bool constant = check.kind == Kind::equals && is_frozen_type(Py_TYPE(check.payload.get()));
      if (check.kind != Kind::identity && check.kind != Kind::type && !constant) return false;
    }
  }
  return true;
}

bool Tree::check_class(Visit& visit, const Node& node, PyObject* value) {
  PyTypeObject* type = reinterpret_cast<PyTypeObject*>(value);
  unsigned int tag = class_tag(type);
  if (tag != 0 && tag == node.class_tag) return true;
  if (!check_node(visit, node, value)) return false;
  node.class_tag = assigned_class_tag(type);
  return true;
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
        // The order of an OrderedDict is its own, but what comes and goes is written in the dict beneath.
        if (PyDict_CheckExact(value) || (PyDict_Check(value) && check.kind != Kind::dict_keys)) {
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

}  // namespace torchdynamo

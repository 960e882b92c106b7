// From guard records to a tree of accesses.
#include <cstring>
#include <string>
#include <unordered_map>

#include "constants.h"
#include "guard_nodes.h"

namespace torchdynamo {

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
  std::shared_ptr<TensorCheck> tensor_check(PyObject* payload);

  Tree& tree_;
  PyObject* pinned_;
  Ref known_;  // (parent, access, key, module) -> node
  std::unordered_map<PyObject*, Py_ssize_t> seen_;  // source record by address -> node; the records outlive the builder
  std::vector<std::shared_ptr<TensorCheck>> tensor_checks_;
  Py_ssize_t guard_ = 0;
};

const std::unordered_map<std::string, Access>& access_names() {
  static const std::unordered_map<std::string, Access> names = {
      {"Argument", Access::argument},       {"Global", Access::global},
      {"ClosureCell", Access::closure_cell}, {"Pinned", Access::pinned},
      {"Attribute", Access::attribute},     {"InstanceAttribute", Access::instance_attribute},
      {"InstanceDict", Access::instance_dict}, {"CellContents", Access::cell_contents},
      {"Item", Access::item},               {"DictKeyAt", Access::dict_key_at},
      {"TypeOf", Access::type_of},          {"Referent", Access::referent},
      {"Reading", Access::reading},
      {"TensorSize", Access::tensor_size},  {"TensorStride", Access::tensor_stride},
      {"TensorOffset", Access::tensor_offset},
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
      {"distinct_object", Kind::distinct_object}, {"all_distinct", Kind::all_distinct},
      {"distinct_storage", Kind::distinct_storage}, {"shape", Kind::shape},
      {"global_state", Kind::global_state}, {"ambient", Kind::ambient}, {"predicate", Kind::predicate},
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
    case Access::reading:
      tree_.runs_python_ = true;
      node.key = Ref::steal(PyObject_GetAttrString(source, "read"));
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

std::shared_ptr<TensorCheck> Builder::tensor_check(PyObject* payload) {
  std::shared_ptr<TensorCheck> check = make_tensor_check(payload);
  if (check == nullptr) return nullptr;
  for (const std::shared_ptr<TensorCheck>& known : tensor_checks_) {
    if (same_check(*known, *check)) return known;
  }
  tensor_checks_.push_back(check);
  return check;
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
      check.tensor = tensor_check(payload);
      return check.tensor != nullptr;
    case Kind::dict_keys:
      check.payload = Ref::steal(PySequence_Tuple(payload));
      return static_cast<bool>(check.payload);
    case Kind::set_items:
      check.payload = Ref::steal(PyFrozenSet_New(payload));
      return static_cast<bool>(check.payload);
    case Kind::equals: {
      richcmpfunc compare = Py_TYPE(payload)->tp_richcompare;
      bool own = may_change(Py_TYPE(payload)) && compare != PyBaseObject_Type.tp_richcompare;
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
  if (kind == Kind::ambient) {
    relation.function = Ref::steal(PyObject_GetAttrString(payload, "function"));
    relation.arguments = Ref::steal(PyObject_GetAttrString(payload, "args"));
    relation.answer = Ref::steal(PyObject_GetAttrString(payload, "value"));
    if (!relation.function || !relation.arguments || !relation.answer) return false;
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
  } else if (kind == Kind::distinct_storage) {
    for (const char* name : {"written", "others"}) {
      Ref part = Ref::steal(PyObject_GetAttrString(payload, name));
      Ref sources = part ? Ref::steal(PySequence_Tuple(part.get())) : Ref();
      if (!sources) return false;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources.get()); i++) {
        int slot = slot_of(PyTuple_GET_ITEM(sources.get(), i));
        if (slot < 0) return false;
        relation.slots.push_back(slot);
      }
      if (relation.written == 0) relation.written = relation.slots.size();
    }
  } else {
    bool several = kind == Kind::all_distinct;
    Ref others = !several ? Ref::steal(PyTuple_Pack(1, payload)) : Ref::steal(PySequence_Tuple(payload));
    if (!others) return false;
    relation.slots.push_back(slot_of(source));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(others.get()); i++) {
      int slot = slot_of(PyTuple_GET_ITEM(others.get(), i));
      bool own = several && slot == relation.slots[0];
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
  place_regions();
  return true;
}

}  // namespace torchdynamo

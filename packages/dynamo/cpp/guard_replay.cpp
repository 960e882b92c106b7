// Records of traversals that succeeded: while the words that a verdict rests on are what they were, it stands.
#include <unordered_map>

#include "guard_nodes.h"

namespace torchdynamo {
namespace {

// The tag under which the interpreter caches lookups in a class: another one after a write to the class or its bases.
unsigned int assigned_class_tag(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030C0000
  static PyObject* any_name = PyUnicode_InternFromString("__name__");
  _PyType_Lookup(type, any_name);  // a lookup gives the class a tag
  if (!(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)) return 0;
#else
  PyUnstable_Type_AssignVersionTag(type);
#endif
  return type->tp_version_tag;
}

// Whether an object of a type of C, which nothing but a class changes, can change itself.
bool is_immutable(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (type == &PyTuple_Type) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++) {
      if (!is_immutable(PyTuple_GET_ITEM(object, i))) return false;
    }
    return true;
  }
  return type == &PyLong_Type || type == &PyBool_Type || type == &PyFloat_Type || type == &PyUnicode_Type ||
         type == &PyBytes_Type || type == &PyComplex_Type || object == Py_None || object == Py_Ellipsis ||
         is_torch_constant(object);
}

// Where an instance keeps its dictionary, which has a version; null: it has none.
PyObject** dict_place(PyObject* object) {
#if PY_VERSION_HEX >= 0x030D0000
  // Attributes that lie in the object itself are written without a word to the dictionary that shows them. Given its own
  // dictionary once more, the object moves them there.
  PyTypeObject* type = Py_TYPE(object);
  if (type->tp_flags & Py_TPFLAGS_INLINE_VALUES) {
    static PyObject* const name = PyUnicode_InternFromString("__dict__");
    PyObject* setter = _PyType_Lookup(type, name);
    if (setter == nullptr || Py_TYPE(setter) != &PyGetSetDescr_Type) return nullptr;
    Ref dict = Ref::steal(PyObject_GenericGetDict(object, nullptr));
    if (!dict || Py_TYPE(setter)->tp_descr_set(setter, object, dict.get()) < 0) {
      PyErr_Clear();
      return nullptr;
    }
  }
#endif
  PyObject** place = _PyObject_GetDictPtr(object);
  return place != nullptr && *place != nullptr ? place : nullptr;
}

template <typename T>
const uint64_t* word_at(T* place) {
  static_assert(sizeof(uint64_t) == sizeof(void*), "words are pointers");
  return reinterpret_cast<const uint64_t*>(place);
}

const Word* first_changed(const std::vector<Word>& words) {
  for (const Word& word : words) {
    if (*word.place != word.content) return &word;
  }
  return nullptr;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------
// Recording: right after a traversal, along the same paths

// What the words recorded so far prove of a value: that it is the very object, or that an object lies at its address,
// which may be another one after the first has died.
enum class Known { object, address };

class Recording {
 public:
  Recording(Tree& tree, const Scope* scope, Record& record) : tree_(tree), scope_(scope), record_(record) {}

  void add_root(size_t index);
  // False: words cannot vouch for this node, nor for those below it.
  bool add(size_t index, PyObject* value, Known known);
  void finish() { record_.epoch = dict_epoch(); }

 private:
  struct Needs {
    bool type = false, instance = false, content = false, size = false;
    std::vector<PyObject*> references;  // weak references that must stay alive
  };

  bool find_needs(const Node& node, PyObject* value, Known known, Needs& needs);
  bool check_needs(const Check& check, PyObject* value, Known known, Needs& needs);
  void add_child(size_t index, PyObject* value, PyObject* dict, Known known);
  PyObject* follow(const Node& child, PyObject* value, PyObject* dict, Known& known);
  PyObject* follow_attribute(const Node& child, PyObject* value, Known& known);

  void word(const uint64_t* place) {
    record_.words.push_back({place, *place});
    record_.word_nodes.push_back(node_);
  }
  const uint64_t* content(PyObject* dict);
  void class_content(PyTypeObject* type);

  Tree& tree_;
  const Scope* scope_;
  Record& record_;
  size_t node_ = 0;
  std::unordered_map<PyObject*, const uint64_t*> dicts_;
};

const uint64_t* Recording::content(PyObject* dict) {
  const uint64_t*& place = dicts_[dict];
  if (place != nullptr) return place;
  DictVersion version(dict);
  place = version.place();
  if (!kDictsAreWatched) {
    word(place);
    return place;
  }
  record_.contents.push_back({place, *place});
  record_.content_nodes.push_back(node_);
  record_.dicts.push_back(std::move(version));
  return place;
}

// The tag is half a word, and padding follows it.
void Recording::class_content(PyTypeObject* type) {
  word(word_at(&type->tp_version_tag));
#if PY_VERSION_HEX < 0x030C0000
  word(word_at(&type->tp_flags));  // of which one says whether the tag is valid
#endif
}

bool Recording::check_needs(const Check& check, PyObject* value, Known known, Needs& needs) {
  bool is_dict = PyDict_Check(value);
  switch (check.kind) {
    case Kind::identity:
      if (known == Known::address && check.weak) needs.references.push_back(check.payload.get());
      return true;
    case Kind::type:
      needs.type |= known == Known::address || may_change(Py_TYPE(value)) || PyModule_Check(value);
      return true;
    case Kind::tensor:
      return true;
    case Kind::equals:
      return value == check.payload.get() || (known == Known::object && is_immutable(value));
    case Kind::dict_keys:
      needs.content = true;
      return is_dict && !PyODict_Check(value);  // the order of an OrderedDict is its own
    case Kind::key_absent:
      needs.content = true;
      return is_dict;
    case Kind::length:
    case Kind::truth:
      if (is_dict) {
        needs.content = true;
      } else if (PyList_Check(value) || (PyTuple_Check(value) && known == Known::address)) {
        needs.size = true;
      } else {
        return PyTuple_Check(value) || (known == Known::object && is_immutable(value));
      }
      return true;
    case Kind::instance_has:
    case Kind::instance_lacks:
      needs.instance = true;
      return true;
    default:
      return false;
  }
}

bool Recording::find_needs(const Node& node, PyObject* value, Known known, Needs& needs) {
  if (node.loose || (node.slot >= 0 && node.symbol)) return false;
  for (const Check& check : node.checks) {
    if (!check_needs(check, value, known, needs)) return false;
  }
  for (size_t index : node.children) {
    Access access = tree_.nodes_[index].access;
    needs.instance |= access == Access::instance_attribute || access == Access::instance_dict;
    needs.type |= access == Access::type_of;
    needs.content |= access == Access::item && PyDict_Check(value);
    needs.content |= access == Access::dict_key_at && PyDict_Check(value) && !PyODict_Check(value);
  }
  return true;
}

bool Recording::add(size_t index, PyObject* value, Known known) {
  const Node& node = tree_.nodes_[index];
  Needs needs;
  if (!find_needs(node, value, known, needs)) return false;
  PyObject *dict = nullptr, **place = nullptr;
  bool is_class = PyType_Check(value);
  if (needs.instance && is_class) {
    if (assigned_class_tag(reinterpret_cast<PyTypeObject*>(value)) == 0) return false;
    dict = instance_dict(value);
  } else if (needs.instance) {
    place = dict_place(value);
    if (place == nullptr) return false;
    dict = *place;
  }
  size_t outer = std::exchange(node_, index);
  // The type first: where the dictionary lies is a matter of it.
  if (needs.type || place != nullptr) word(word_at(&value->ob_type));
  for (PyObject* reference : needs.references) word(word_at(&reinterpret_cast<PyWeakReference*>(reference)->wr_object));
  if (needs.instance && is_class) class_content(reinterpret_cast<PyTypeObject*>(value));
  if (place != nullptr) {
    word(word_at(place));
    content(dict);
  }
  if (needs.content) content(value);
  if (needs.size) word(word_at(&reinterpret_cast<PyVarObject*>(value)->ob_size));
  for (const Check& check : node.checks) {
    if (check.kind == Kind::tensor) record_.tensors.push_back(tensor_with_check(value, check.tensor.get()));
  }
  for (Py_ssize_t input : node.inputs) record_.inputs.push_back({value, input});
  if (node.slot >= 0) record_.slots.push_back({value, node.slot});
  for (size_t child : node.children) add_child(child, value, dict, known);
  node_ = outer;
  return true;
}

void Recording::add_child(size_t index, PyObject* value, PyObject* dict, Known known) {
  const Node& child = tree_.nodes_[index];
  if (is_number_access(child.access)) {
    record_.questions.push_back({Question::Of::number, index, value});
    return;
  }
  PyObject* next = follow(child, value, dict, known);
  if (next == nullptr) {
    record_.questions.push_back({Question::Of::child, index, value});
  } else if (!add(index, next, known)) {
    record_.questions.push_back({Question::Of::value, index, next});
  }
}

// One step from `value`, of which this is `known`; afterwards `known` is of the result. Null where words cannot follow.
PyObject* Recording::follow(const Node& child, PyObject* value, PyObject* dict, Known& known) {
  PyObject** item = nullptr;
  switch (child.access) {
    case Access::instance_attribute:
      known = Known::object;
      return dict != nullptr ? dict_lookup(dict, child.key.get()) : nullptr;
    case Access::instance_dict:
      known = Known::object;
      return PyType_Check(value) ? nullptr : dict;
    case Access::item:
      if (PyDict_Check(value)) {
        known = Known::object;
        return dict_lookup(value, child.key.get());
      }
      if (!PyLong_Check(child.key.get()) || !(PyTuple_Check(value) || PyList_Check(value))) return nullptr;
      if (child.index < -Py_SIZE(value) || child.index >= Py_SIZE(value)) return nullptr;
      item = PyTuple_Check(value) ? reinterpret_cast<PyTupleObject*>(value)->ob_item
                                  : reinterpret_cast<PyListObject*>(value)->ob_item;
      item += child.index < 0 ? child.index + Py_SIZE(value) : child.index;
      if (PyTuple_Check(value) && known == Known::object) return *item;
      word(word_at(&reinterpret_cast<PyVarObject*>(value)->ob_size));
      if (PyList_Check(value)) word(word_at(&reinterpret_cast<PyListObject*>(value)->ob_item));
      word(word_at(item));
      known = Known::address;
      return *item;
    case Access::dict_key_at: {
      Visit unused{scope_, nullptr};
      bool plain = PyDict_Check(value) && !PyODict_Check(value);
      known = Known::object;
      return plain ? tree_.access(unused, child, value, dict) : nullptr;
    }
    case Access::type_of:
      known = Known::address;
      return reinterpret_cast<PyObject*>(Py_TYPE(value));
    case Access::referent:
      if (!PyWeakref_Check(value) || weak_target(value) == nullptr) return nullptr;
      word(word_at(&reinterpret_cast<PyWeakReference*>(value)->wr_object));
      known = Known::address;
      return weak_target(value);
    case Access::cell_contents:
      if (!PyCell_Check(value)) return nullptr;
      item = &reinterpret_cast<PyCellObject*>(value)->ob_ref;
      word(word_at(item));
      known = Known::address;
      return *item;
    case Access::attribute:
      return follow_attribute(child, value, known);
    default:
      return nullptr;
  }
}

PyObject* Recording::follow_attribute(const Node& child, PyObject* value, Known& known) {
  static PyObject* const function = PyUnicode_InternFromString("__func__");
  static PyObject* const owner = PyUnicode_InternFromString("__self__");
  PyObject* name = child.key.get();
  if (PyModule_CheckExact(value)) {
    PyObject* dict = PyModule_GetDict(value);
    PyObject* found = known == Known::object ? dict_lookup(dict, name) : nullptr;
    if (found != nullptr) content(dict);
    return found;
  }
  if (PyType_Check(value) && is_mro(name)) {  // a class has another tag when its bases change
    if (assigned_class_tag(reinterpret_cast<PyTypeObject*>(value)) == 0) return nullptr;
    class_content(reinterpret_cast<PyTypeObject*>(value));
    known = Known::object;
    return reinterpret_cast<PyTypeObject*>(value)->tp_mro;
  }
  if (PyFunction_Check(value)) {
    PyObject** place;
    PyObject* found = function_part(value, name, &place);
    if (found != nullptr) word(word_at(place));
    known = Known::address;
    return found;
  }
  if (PyMethod_Check(value) && known == Known::object) {  // a bound method keeps its parts
    if (name == function) return PyMethod_GET_FUNCTION(value);
    if (name == owner) return PyMethod_GET_SELF(value);
  }
  return nullptr;
}

// A root that is not an argument.
void Recording::add_root(size_t index) {
  const Node& node = tree_.nodes_[index];
  node_ = index;
  PyObject* value = nullptr;
  Known known = Known::object;
  if (!node.loose) {
    Visit unused{scope_, nullptr};
    value = tree_.root(unused, node);
    if (node.access == Access::global && value != nullptr) {
      record_.readers.push_back({content(scope_->globals), index});
    } else if (node.access == Access::module_global && value != nullptr) {
      PyObject* modules = PyImport_GetModuleDict();
      record_.readers.push_back({content(modules), index});
      record_.readers.push_back({content(instance_dict(dict_lookup(modules, node.module.get()))), index});
    } else if (node.access == Access::closure_cell && value != nullptr) {
      word(word_at(&reinterpret_cast<PyCellObject*>(PyTuple_GET_ITEM(scope_->closure, node.index))->ob_ref));
      known = Known::address;
    }
  }
  if (value == nullptr || !add(index, value, known)) {
    record_.questions.push_back({Question::Of::root, index, nullptr});
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Replaying

// False: a word changed (`*changed` and `*owner` are set), or a guard that is asked at each call fails.
bool Tree::replay(Visit& visit, Record& record, const uint64_t** changed, size_t* owner) {
  if (kDictsAreWatched && record.epoch != dict_epoch()) {
    if (const Word* word = first_changed(record.contents)) {
      *changed = word->place;
      *owner = record.content_nodes[word - record.contents.data()];
      return false;
    }
    record.epoch = dict_epoch();
  }
  if (const Word* word = first_changed(record.words)) {
    *changed = word->place;
    *owner = record.word_nodes[word - record.words.data()];
    return false;
  }
  if (!tensors_hold(record.tensors.data(), record.tensors.data() + record.tensors.size())) return false;
  for (const Found& found : record.slots) visit.objects[found.index] = found.object;
  for (const Found& found : record.inputs) PyList_SET_ITEM(visit.inputs, found.index, Py_NewRef(found.object));
  if (record.questions.empty()) return true;
  if (runs_python_) {
    for (const Found& found : record.slots) visit.kept.push_back(Ref::share(found.object));
    for (const Question& question : record.questions) visit.kept.push_back(Ref::share(question.object));
  }
  for (const Question& question : record.questions) {
    if (!answer(visit, question)) return false;
  }
  return true;
}

bool Tree::answer(Visit& visit, const Question& question) {
  const Node& node = nodes_[question.node];
  PyObject *value = question.object, *dict = nullptr;
  switch (question.of) {
    case Question::Of::root:
      return check_root(visit, node);
    case Question::Of::number:
      return check_number(visit, node, value);
    case Question::Of::child:
      value = access(visit, node, value, dict);
      if (value == nullptr) {
        visit.failed = node.first_guard;
        return false;
      }
      if (runs_python_) visit.kept.push_back(Ref::share(value));
      [[fallthrough]];
    default:
      return check_below(visit, node, value);
  }
}

bool Tree::check_in_full(Visit& visit, const Region& region, PyObject* anchor) {
  if (anchor != nullptr) return check_node(visit, nodes_[region.nodes[0]], anchor);
  for (size_t index : region.nodes) {
    if (!check_root(visit, nodes_[index])) return false;
  }
  return true;
}

bool Tree::check_region(Visit& visit, Region& region, PyObject* anchor) {
  constexpr Py_ssize_t kPatience = 16;  // recordings that need not have paid
  constexpr size_t kRecords = 32;
  // A guard that is asked may run Python code, or start a collection whose finalizers call this very function.
  if (region.busy) return check_in_full(visit, region, anchor);
  region.busy = true;
  struct Leave {
    Region& region;
    ~Leave() { region.busy = false; }
  } leave{region};
  size_t place = 0;
  const Scope& scope = *visit.scope;
  while (place < region.records.size()) {
    const Record& record = *region.records[place];
    bool steady = record.globals == scope.globals && record.closure == scope.closure;
    if (anchor != nullptr ? record.anchor == anchor : steady) break;
    place++;
  }
  if (place < region.records.size()) {
    Record& record = *region.records[place];
    const uint64_t* changed = nullptr;
    size_t owner = 0;
    if (replay(visit, record, &changed, &owner)) {
      record.hits++;
      region.successes++;
      return true;
    }
    if (PyErr_Occurred()) return false;
    for (Py_ssize_t input : region.inputs) Py_CLEAR(reinterpret_cast<PyListObject*>(visit.inputs)->ob_item[input]);
    if (changed == nullptr) return check_in_full(visit, region, anchor);
    blame(record, changed, owner);
  }
  if (!check_in_full(visit, region, anchor)) return false;
  if (region.attempts > kPatience && region.successes < region.attempts) return true;
  region.attempts++;
  auto record = std::make_unique<Record>();
  Recording recording(*this, &scope, *record);
  if (anchor != nullptr) {
    record->anchor = anchor;
    if (!recording.add(region.nodes[0], anchor, Known::address)) {
      record->questions.clear();
      return true;
    }
  } else {
    record->globals = scope.globals;
    record->closure = scope.closure;
    for (size_t index : region.nodes) recording.add_root(index);
  }
  recording.finish();
  if (place == region.records.size() && place == kRecords) place = region.oldest++ % kRecords;
  if (place == region.records.size()) region.records.emplace_back();
  region.records[place] = std::move(record);
  return true;
}

// A word that changes again and again takes its node, and for a dictionary of names all that read it, out of records:
// these are asked at each call, and what lies below them is recorded apart.
void Tree::blame(const Record& record, const uint64_t* place, size_t owner) {
  constexpr Py_ssize_t kOften = 8;
  if (record.hits >= kOften) return;
  loosen(nodes_[owner]);
  for (const Reader& reader : record.readers) {
    if (reader.place == place && reader.node != owner) loosen(nodes_[reader.node]);
  }
}

void Tree::loosen(Node& node) {
  constexpr unsigned char kTolerated = 3;
  if (node.loose || ++node.blamed < kTolerated) return;
  node.loose = true;
  node.region = -1;
  for (size_t child : node.children) {
    if (!is_number_access(nodes_[child].access)) place_anchor(nodes_[child]);
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Regions

// Number of nodes below `node`, itself included; their inputs are added to `inputs`.
size_t Tree::survey(const Node& node, std::vector<Py_ssize_t>& inputs) const {
  size_t size = 1;
  inputs.insert(inputs.end(), node.inputs.begin(), node.inputs.end());
  for (size_t child : node.children) size += survey(nodes_[child], inputs);
  return size;
}

void Tree::place_regions() {
  if (!dicts_have_versions()) return;
  auto steady = std::make_unique<Region>();
  std::vector<size_t> arguments;
  for (size_t index : roots_) (nodes_[index].access == Access::argument ? arguments : steady->nodes).push_back(index);
  if (steady->nodes.size() > 1) {
    for (size_t index : steady->nodes) survey(nodes_[index], steady->inputs);
    roots_ = std::move(arguments);
    steady_ = steady.get();
    regions_.push_back(std::move(steady));
  }
  for (size_t index : roots_) {
    if (nodes_[index].access == Access::argument) place_anchor(nodes_[index]);
  }
}

// Anchors are the topmost large nodes that are read through an instance's dictionary; items of an argument tuple, which
// is a new object at each call, are anchored one by one.
void Tree::place_anchor(Node& node) {
  constexpr size_t kWorthwhile = 6;
  if (node.loose || node.region >= 0) return;
  auto region = std::make_unique<Region>();
  if (survey(node, region->inputs) < kWorthwhile) return;
  bool by_instance = false;
  for (size_t child : node.children) {
    Access access = nodes_[child].access;
    by_instance |= access == Access::instance_attribute || access == Access::instance_dict;
  }
  if (by_instance) {
    node.region = static_cast<int>(regions_.size());
    region->nodes.push_back(static_cast<size_t>(&node - nodes_.data()));
    regions_.push_back(std::move(region));
    return;
  }
  for (size_t child : node.children) {
    if (!is_number_access(nodes_[child].access)) place_anchor(nodes_[child]);
  }
}

}  // namespace torchdynamo

// The records of a guard tree and the tree itself: built in guard_build.cpp, checked in guard_tree.cpp, replayed in
// guard_replay.cpp.
#pragma once

#include <memory>
#include <vector>

#include "guard_tree.h"
#include "shape_program.h"
#include "tensor_guard.h"

namespace torchdynamo {

enum class Access {
  argument, global, module_global, closure_cell, pinned,  // roots
  attribute, instance_attribute, instance_dict, cell_contents, item, dict_key_at, type_of,
  tensor_size, tensor_stride, tensor_offset,  // integers, read without making a Python object
};

enum class Kind {
  type, identity, equals, length, dict_keys, set_items, instance_has, instance_lacks, key_absent, truth, tensor, predicate,
  same_object, distinct_object, distinct_storage, shape, global_state,  // of the whole call, not of one object
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
  bool by_class = false;  // a pinned class whose guards all follow from its version tag
  mutable unsigned int class_tag = 0;  // with which they held; 0: unknown
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

inline bool is_number_access(Access access) { return access >= Access::tensor_size; }

// The instance's or the class's own dictionary (borrowed), or null. Asks no descriptor and no __getattr__.
PyObject* instance_dict(PyObject* object);
PyObject* dict_lookup(PyObject* dict, PyObject* key);

#if PY_VERSION_HEX < 0x030D0000
constexpr bool kDictsHaveVersions = true;
#else
constexpr bool kDictsHaveVersions = false;
#endif

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
  bool follows_from_class(const Node& node) const;
  bool check_class(Visit& visit, const Node& node, PyObject* value);

  Ref guards_, inputs_;
  std::vector<Node> nodes_;
  std::vector<size_t> roots_;
  std::vector<std::unique_ptr<Replay>> replays_;  // by `Node::replay`
  std::vector<Relation> before_, after_;  // ambient state first, relations between objects at the end
  Py_ssize_t input_count_ = 0;
  int slot_count_ = 0;
  bool runs_python_ = false;  // then every visited object is kept alive
};

}  // namespace torchdynamo

// The records of a guard tree and the tree itself: built in guard_build.cpp, checked in guard_tree.cpp, recorded and
// replayed in guard_replay.cpp.
#pragma once

#include <memory>
#include <vector>

#include "dict_version.h"
#include "guard_tree.h"
#include "shape_program.h"
#include "tensor_guard.h"

namespace torchdynamo {

enum class Access {
  argument, global, module_global, closure_cell, pinned,  // roots
  attribute, instance_attribute, instance_dict, cell_contents, item, dict_key_at, type_of, referent,
  reading,  // what a Python function gives for the object
  tensor_size, tensor_stride, tensor_offset,  // integers, read without making a Python object
};

enum class Kind {
  type, identity, equals, length, dict_keys, set_items, instance_has, instance_lacks, key_absent, truth, tensor, predicate,
  same_object, distinct_object, all_distinct, distinct_storage, shape, global_state, ambient,  // of the whole call, not of one object
};

struct Check {
  Kind kind;
  Py_ssize_t guard;
  Ref payload;
  int64_t number = 0;
  bool weak = false;
  std::shared_ptr<TensorCheck> tensor;  // one for all tensors of the same metadata
};

// One source. `key` is what its access needs: a name, a constant key, a pinned object.
struct Node {
  Access access;
  Ref key, module;
  int64_t index = 0;
  Py_ssize_t first_guard = 0;
  int slot = -1;
  int region = -1;         // of an anchor
  bool loose = false;      // what it reads changes too often to be recorded
  unsigned char blamed = 0;
  bool symbol = false;     // a shape program reads it: it must be an integer of 64 bits, or a float (whose bits are the number)
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
  Ref function, arguments, answer;  // of an ambient read
  mutable std::vector<PyObject*> distinct;  // addresses that were found to be all different, only compared
  size_t written = 0;                       // of tensors: so many of the first slots are written
  mutable std::vector<MemoryRange> memory;  // that was found to be apart
};

// A word of memory and what it held. Words are compared in order: each lies in an object that is alive when the words
// ahead of it are as they were.
struct Word {
  const uint64_t* place;
  uint64_t content;
};

// A guard that words cannot vouch for, asked at each call.
struct Question {
  enum class Of { root, value, child, number } of;
  size_t node;
  PyObject* object;  // the node's value, or what it is read from; borrowed
};

struct Found {
  PyObject* object;  // borrowed
  Py_ssize_t index;  // of the input, or of the slot
};

// A root that is read from the dictionary whose version lies at `place`.
struct Reader {
  const uint64_t* place;
  size_t node;
};

// A traversal that succeeded, as the words that its verdict rests on: while they are what they were, all else is.
struct Record {
  PyObject *anchor = nullptr, *globals = nullptr, *closure = nullptr;  // compared, never looked into
  std::vector<Word> contents;  // versions of watched dictionaries: equal as long as the epoch is
  std::vector<Word> words;
  std::vector<size_t> content_nodes, word_nodes;  // who asked for each
  std::vector<DictVersion> dicts;
  std::vector<Reader> readers;
  uint64_t epoch = 0;
  std::vector<TensorOf> tensors;
  std::vector<Found> inputs, slots;
  std::vector<Question> questions;
  Py_ssize_t hits = 0;
};

// Nodes that are recorded together: all that is not read from the arguments, or everything below one anchor. An anchor
// may be another object at each call (the layers of a net that share a compiled function): each has its record.
struct Region {
  std::vector<size_t> nodes;
  std::vector<Py_ssize_t> inputs;  // all that are below
  std::vector<std::unique_ptr<Record>> records;
  size_t oldest = 0;
  bool busy = false;
  Py_ssize_t attempts = 0, successes = 0;
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

bool is_mro(PyObject* name);

// What guards read of functions, without a reference (borrowed); null: something else. `*place` is where it lies.
PyObject* function_part(PyObject* function, PyObject* name, PyObject*** place);

class Tree {
 public:
  bool build(PyObject* guards, PyObject* inputs, PyObject* pinned);
  PyObject* check(const Scope& scope, Py_ssize_t* failed);
  int traverse(visitproc visit, void* arg);

  PyObject* guards() const { return guards_.get(); }
  PyObject* inputs() const { return inputs_.get(); }

 private:
  friend class Builder;
  friend class Recording;
  PyObject* access(Visit& visit, const Node& node, PyObject* base, PyObject*& dict);
  PyObject* root(Visit& visit, const Node& node);
  bool check_node(Visit& visit, const Node& node, PyObject* value);
  bool check_number(Visit& visit, const Node& node, PyObject* base);
  bool run_check(const Check& check, PyObject* value);
  bool check_relation(Visit& visit, const Relation& relation);
  bool check_root(Visit& visit, const Node& node);
  bool check_below(Visit& visit, const Node& node, PyObject* value);

  void place_regions();
  void place_anchor(Node& node);
  size_t survey(const Node& node, std::vector<Py_ssize_t>& inputs) const;
  bool check_region(Visit& visit, Region& region, PyObject* anchor);
  bool check_in_full(Visit& visit, const Region& region, PyObject* anchor);
  bool replay(Visit& visit, Record& record, const uint64_t** changed, size_t* owner);
  bool answer(Visit& visit, const Question& question);
  void blame(const Record& record, const uint64_t* place, size_t owner);
  void loosen(Node& node);

  Ref guards_, inputs_;
  std::vector<Node> nodes_;
  std::vector<size_t> roots_;
  std::vector<std::unique_ptr<Region>> regions_;  // by `Node::region`
  Region* steady_ = nullptr;  // of what is not read from the arguments
  std::vector<Relation> before_, after_;  // ambient state first, relations between objects at the end
  Py_ssize_t input_count_ = 0;
  int slot_count_ = 0;
  bool runs_python_ = false;  // then every visited object is kept alive
};

}  // namespace torchdynamo

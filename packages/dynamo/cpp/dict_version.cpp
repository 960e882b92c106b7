#include "dict_version.h"

#if PY_VERSION_HEX >= 0x030C0000

#include <unordered_map>

namespace torchdynamo {

struct WatchedDict {
  PyObject* dict;  // borrowed; null once it is gone
  uint64_t version = 1;
  Py_ssize_t users = 0;
};

uint64_t watched_epoch = 1;

namespace {

int watcher = -1;

// Never destroyed: dictionaries are told of while the interpreter shuts down. All access is under the GIL.
std::unordered_map<PyObject*, WatchedDict*>& watched_dicts() {
  static auto* dicts = new std::unordered_map<PyObject*, WatchedDict*>();
  return *dicts;
}

// Called ahead of the change.
int note_change(PyDict_WatchEvent event, PyObject* dict, PyObject*, PyObject*) {
  auto found = watched_dicts().find(dict);
  if (found == watched_dicts().end()) return 0;
  found->second->version++;
  watched_epoch++;
  if (event == PyDict_EVENT_DEALLOCATED) {
    found->second->dict = nullptr;
    watched_dicts().erase(found);
  }
  return 0;
}

}  // namespace

DictVersion::DictVersion(PyObject* dict) {
  WatchedDict*& known = watched_dicts()[dict];
  if (known == nullptr) {
    known = new WatchedDict{dict};
    if (PyDict_Watch(watcher, dict) < 0) PyErr_Clear();
  }
  watched_ = known;
  watched_->users++;
}

DictVersion::~DictVersion() {
  if (watched_ == nullptr || --watched_->users > 0) return;
  if (watched_->dict != nullptr) {
    if (PyDict_Unwatch(watcher, watched_->dict) < 0) PyErr_Clear();
    watched_dicts().erase(watched_->dict);
  }
  delete watched_;
}

const uint64_t* DictVersion::place() const { return &watched_->version; }

int add_dict_watcher() {
  watcher = PyDict_AddWatcher(note_change);
  return watcher;
}

bool dicts_have_versions() { return watcher >= 0; }

}  // namespace torchdynamo

#endif

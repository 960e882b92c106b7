// A number in memory that differs from what it was after every change of a dictionary.
#pragma once

#include <cstdint>

#include "refs.h"

namespace torchdynamo {

#if PY_VERSION_HEX < 0x030C0000

// Up to 3.11 the interpreter keeps such a number in each dictionary, and no two states of any dictionaries share one.
// It lies in the dictionary: it may be read while the dictionary is known to be alive.
constexpr bool kDictsAreWatched = false;

class DictVersion {
 public:
  explicit DictVersion(PyObject* dict) : dict_(dict) {}
  const uint64_t* place() const { return &reinterpret_cast<PyDictObject*>(dict_)->ma_version_tag; }

 private:
  PyObject* dict_;  // borrowed
};

inline int add_dict_watcher() { return 0; }
inline bool dicts_have_versions() { return true; }
inline uint64_t dict_epoch() { return 0; }

#else

// Later versions tell a watcher of each change and of a dictionary's end: the number is kept here, may always be read,
// and changes together with the epoch, which is one for all watched dictionaries.
constexpr bool kDictsAreWatched = true;

struct WatchedDict;

class DictVersion {
 public:
  explicit DictVersion(PyObject* dict);
  DictVersion(DictVersion&& other) noexcept : watched_(std::exchange(other.watched_, nullptr)) {}
  DictVersion& operator=(DictVersion&& other) noexcept {
    std::swap(watched_, other.watched_);
    return *this;
  }
  DictVersion(const DictVersion&) = delete;
  DictVersion& operator=(const DictVersion&) = delete;
  ~DictVersion();
  const uint64_t* place() const;

 private:
  WatchedDict* watched_;  // shared by all who watch the same dictionary
};

extern uint64_t watched_epoch;

// Negative with an exception set when the interpreter has no watcher left: then no dictionary has a version.
int add_dict_watcher();
bool dicts_have_versions();
inline uint64_t dict_epoch() { return watched_epoch; }

#endif

}  // namespace torchdynamo

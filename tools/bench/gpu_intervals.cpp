// When a GPU's kernels, copies and fills ran, by CUPTI's activity records and nothing else: none of the calls of the
// runtime and the driver, which would lengthen each launch.
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace {

// The part of cupti_activity.h that is used. Records are packed; those of all three kinds begin alike.
constexpr uint32_t kMemcpy = 1, kMemset = 2, kConcurrentKernel = 10;
constexpr size_t kStart = 16, kEnd = 24, kKernelName = 104;
constexpr size_t kBytes = 8 << 20;

using Requested = void (*)(uint8_t**, size_t*, size_t*);
using Completed = void (*)(void*, uint32_t, uint8_t*, size_t, size_t);

struct Interval {
  std::string name;
  uint64_t start, end;
};

struct Cupti {
  int (*register_callbacks)(Requested, Completed);
  int (*enable)(uint32_t);
  int (*flush)(uint32_t);
  int (*next)(uint8_t*, size_t, uint8_t**);
  int (*timestamp)(uint64_t*);
} cupti;

std::mutex mutex;
std::vector<Interval> intervals;

template <typename T>
T read(const uint8_t* record, size_t place) {
  T value;
  std::memcpy(&value, record + place, sizeof(T));
  return value;
}

void requested(uint8_t** buffer, size_t* size, size_t* most) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBytes));
  *size = kBytes;
  *most = 0;
}

void completed(void*, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  const std::lock_guard<std::mutex> lock(mutex);
  uint8_t* record = nullptr;
  while (cupti.next(buffer, valid, &record) == 0) {
    const auto kind = read<uint32_t>(record, 0);
    if (kind != kMemcpy && kind != kMemset && kind != kConcurrentKernel) continue;
    const char* name = kind == kMemcpy ? "copy" : kind == kMemset ? "fill" : read<const char*>(record, kKernelName);
    intervals.push_back({name, read<uint64_t>(record, kStart), read<uint64_t>(record, kEnd)});
  }
  std::free(buffer);
}

template <typename F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

extern "C" {

// Begins, by the CUPTI of this file. 0, or CUPTI's error; -1 where the file is none.
int begin(const char* file) {
  void* library = dlopen(file, RTLD_NOW);
  if (library == nullptr || !find(library, "cuptiActivityRegisterCallbacks", cupti.register_callbacks) ||
      !find(library, "cuptiActivityEnable", cupti.enable) ||
      !find(library, "cuptiActivityFlushAll", cupti.flush) ||
      !find(library, "cuptiActivityGetNextRecord", cupti.next) ||
      !find(library, "cuptiGetTimestamp", cupti.timestamp)) {
    return -1;
  }
  if (const int error = cupti.register_callbacks(requested, completed)) return error;
  for (const uint32_t kind : {kMemcpy, kMemset, kConcurrentKernel}) {
    if (const int error = cupti.enable(kind)) return error;
  }
  return 0;
}

// CUPTI's clock, in nanoseconds.
uint64_t now() {
  uint64_t found = 0;
  cupti.timestamp(&found);
  return found;
}

// Writes a line for each interval since the last time: start, end, name. The device is to be idle.
int take(const char* path) {
  cupti.flush(1);
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return -1;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Interval& interval : intervals) {
    char* plain = abi::__cxa_demangle(interval.name.c_str(), nullptr, nullptr, nullptr);
    std::fprintf(file, "%llu %llu %s\n", static_cast<unsigned long long>(interval.start),
                 static_cast<unsigned long long>(interval.end), plain == nullptr ? interval.name.c_str() : plain);
    std::free(plain);
  }
  intervals.clear();
  return std::fclose(file);
}

}

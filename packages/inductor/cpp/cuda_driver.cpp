#include "cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <utility>

namespace inductor {
namespace {

using Result = int;
constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kDefaultShared = 48 * 1024;

// The driver's entry points that are used here, by the names under which libcuda.so.1 exports them.
struct Driver {
  Result (*init)(unsigned);
  Result (*device_get)(int*, int);
  Result (*primary_retain)(void**, int);
  Result (*context_current)(void**);
  Result (*context_set)(void*);
  Result (*module_load)(void**, const void*);
  Result (*module_function)(void**, void*, const char*);
  Result (*function_attribute)(void*, int, int);
  Result (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  Result (*error_string)(Result, const char**);
  Result (*device_name)(char*, int, int);
  Result (*is_capturing)(void*, int*);
  Result (*event_create)(void**, unsigned);
  Result (*event_record)(void*, void*);
  Result (*event_synchronize)(void*);
  Result (*event_milliseconds)(float*, void*, void*);
  Result (*event_destroy)(void*);
};

template <class F>
void resolve(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) {
    throw std::runtime_error(std::string("libcuda.so.1 lacks ") + name + ": update the NVIDIA driver");
  }
}

const Driver& driver() {
  static const Driver loaded = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw std::runtime_error("a CUDA kernel was launched, but libcuda.so.1 cannot be loaded: install the NVIDIA driver");
    }
    Driver d{};
    resolve(library, "cuInit", d.init);
    resolve(library, "cuDeviceGet", d.device_get);
    resolve(library, "cuDevicePrimaryCtxRetain", d.primary_retain);
    resolve(library, "cuCtxGetCurrent", d.context_current);
    resolve(library, "cuCtxSetCurrent", d.context_set);
    resolve(library, "cuModuleLoadData", d.module_load);
    resolve(library, "cuModuleGetFunction", d.module_function);
    resolve(library, "cuFuncSetAttribute", d.function_attribute);
    resolve(library, "cuLaunchKernel", d.launch);
    resolve(library, "cuGetErrorString", d.error_string);
    resolve(library, "cuDeviceGetName", d.device_name);
    resolve(library, "cuStreamIsCapturing", d.is_capturing);
    resolve(library, "cuEventCreate", d.event_create);
    resolve(library, "cuEventRecord", d.event_record);
    resolve(library, "cuEventSynchronize", d.event_synchronize);
    resolve(library, "cuEventElapsedTime", d.event_milliseconds);
    resolve(library, "cuEventDestroy_v2", d.event_destroy);
    d.init(0);
    return d;
  }();
  return loaded;
}

void check(Result result, const std::string& what) {
  if (result == 0) return;
  const char* text = nullptr;
  driver().error_string(result, &text);
  throw std::runtime_error(what + ": CUDA driver error " + std::to_string(result) + " (" + (text ? text : "unknown") + ")");
}

// A thread that has called no CUDA function yet has no context; the runtime's is the primary one.
void ensure_context(int device) {
  thread_local bool ready = false;
  if (ready) return;
  const Driver& d = driver();
  void* context = nullptr;
  check(d.context_current(&context), "cuCtxGetCurrent");
  if (context == nullptr) {
    int handle = 0;
    check(d.device_get(&handle, device), "cuDeviceGet");
    check(d.primary_retain(&context, handle), "cuDevicePrimaryCtxRetain");
    check(d.context_set(context), "cuCtxSetCurrent");
  }
  ready = true;
}

class DriverEvent {
 public:
  DriverEvent() { check(driver().event_create(&event_, 0), "cuEventCreate"); }
  DriverEvent(const DriverEvent&) = delete;
  DriverEvent& operator=(const DriverEvent&) = delete;
  ~DriverEvent() { driver().event_destroy(event_); }
  void record(void* stream) { check(driver().event_record(event_, stream), "cuEventRecord"); }
  void* get() const { return event_; }

 private:
  void* event_ = nullptr;
};

}  // namespace

bool is_capturing(void* stream) {
  int status = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
  check(driver().is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

double device_seconds(void* stream, const std::function<void()>& launch) {
  DriverEvent start, stop;
  start.record(stream);
  launch();
  stop.record(stream);
  check(driver().event_synchronize(stop.get()), "cuEventSynchronize");
  float milliseconds = 0;
  check(driver().event_milliseconds(&milliseconds, start.get(), stop.get()), "cuEventElapsedTime");
  return milliseconds * 1e-3;
}

std::string device_name(int device) {
  int handle = 0;
  char name[256] = "";
  check(driver().device_get(&handle, device), "cuDeviceGet");
  check(driver().device_name(name, sizeof name, handle), "cuDeviceGetName");
  return name;
}

TritonKernel::TritonKernel(
    std::string binary, std::string name, std::string parameters, int scratch, int warps, int warp_size, int shared)
    : binary_(std::move(binary)),
      name_(std::move(name)),
      parameters_(std::move(parameters)),
      scratch_(scratch),
      threads_(warps * warp_size),
      shared_(shared) {}

void* TritonKernel::function(int device) {
  if (device < 0 || device >= kMaxDevices) throw std::runtime_error("no CUDA device " + std::to_string(device));
  void* ready = loaded_[device].load(std::memory_order_acquire);
  if (ready != nullptr) return ready;
  std::lock_guard<std::mutex> lock(mutex_);
  if (loaded_[device].load(std::memory_order_relaxed) == nullptr) {
    const Driver& d = driver();
    void* module = nullptr;
    void* function = nullptr;
    check(d.module_load(&module, binary_.data()), "loading Triton kernel " + name_);
    check(d.module_function(&function, module, name_.c_str()), "finding Triton kernel " + name_);
    if (shared_ > kDefaultShared) {
      check(d.function_attribute(function, kMaxDynamicShared, shared_), "reserving shared memory for " + name_);
    }
    loaded_[device].store(function, std::memory_order_release);
  }
  return loaded_[device].load(std::memory_order_relaxed);
}

void TritonKernel::launch(int device, void* stream, const int64_t grid[3], const int64_t* arguments) {
  if (grid[0] <= 0 || grid[1] <= 0 || grid[2] <= 0) return;  // an empty tensor: nothing to do
  ensure_context(device);
  constexpr size_t kMaxParameters = 512;
  void* cells[kMaxParameters];
  static const void* const null_scratch = nullptr;
  const size_t count = parameters_.size();
  if (count + scratch_ > kMaxParameters) throw std::runtime_error("Triton kernel " + name_ + " has too many parameters");
  for (size_t i = 0; i < count; ++i) cells[i] = const_cast<int64_t*>(arguments + i);  // little-endian: an int32 is the low half
  for (int i = 0; i < scratch_; ++i) cells[count + i] = const_cast<void*>(static_cast<const void*>(&null_scratch));
  const Result launched = driver().launch(
          function(device), static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2]),
          static_cast<unsigned>(threads_), 1, 1, static_cast<unsigned>(shared_), stream, cells, nullptr);
  if (launched != 0) check(launched, "launching Triton kernel " + name_);  // the text is made only when needed
}

}  // namespace inductor

// Launches Triton's binaries through the CUDA driver, which is found at run time: nothing here links CUDA.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace inductor {

// One compiled kernel, loaded on each device at its first launch there.
class TritonKernel {
 public:
  enum class Parameter : char { Pointer = 'p', Aligned = 'a', Int32 = 'i', Int64 = 'l' };

  TritonKernel(std::string binary, std::string name, std::string parameters, int scratch, int warps, int warp_size, int shared);

  // `arguments` points at one 8-byte cell a parameter, in the parameters' order.
  void launch(int device, void* stream, const int64_t grid[3], const int64_t* arguments);

  const std::string& name() const { return name_; }
  const std::string& parameters() const { return parameters_; }

 private:
  void* function(int device);

  std::string binary_, name_, parameters_;
  int scratch_;  // trailing pointer parameters that Triton adds; the kernels made here leave them unused
  int threads_;
  int shared_;
  std::mutex mutex_;
  static constexpr int kMaxDevices = 64;
  std::array<std::atomic<void*>, kMaxDevices> loaded_{};  // by device
};

// Whether a stream's work is being recorded for a graph: nothing may wait for it then.
bool is_capturing(void* stream);

// Seconds between the first and the last of what `launch` puts on a stream. Waits for it.
double device_seconds(void* stream, const std::function<void()>& launch);

// What the driver calls a device: `NVIDIA H200`.
std::string device_name(int device);

}  // namespace inductor

// Which of several kernels a device is fastest with: measured once, remembered in a file.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace inductor {

// What a product is computed by: ATen, or an algorithm of cuBLASLt with the workspace that it asks for.
struct ProductChoice {
  bool aten = true;
  std::array<uint64_t, 8> algorithm{};
  uint64_t workspace = 0;  // bytes
};

// The choices of a file: a line each, of a key without blanks, and of the choice. What cannot be read counts as not
// there; a file that cannot be written keeps the choices of this process alone.
class ProductChoices {
 public:
  explicit ProductChoices(std::string path) : path_(std::move(path)) {}

  // The process' one for a file.
  static std::shared_ptr<ProductChoices> of(const std::string& path);

  std::optional<ProductChoice> find(const std::string& key);
  void remember(const std::string& key, const ProductChoice& choice);

  static std::string line(const std::string& key, const ProductChoice& choice);
  static std::optional<std::pair<std::string, ProductChoice>> read(const std::string& line);

 private:
  void load();

  std::string path_;
  std::mutex mutex_;
  bool loaded_ = false;
  std::unordered_map<std::string, ProductChoice> known_;
};

// The least seconds on a stream's device that each candidate takes, by turns, so that what the device does meanwhile
// meets all of them. A candidate says whether it was launched; one that was not takes forever. Waits for the device.
std::vector<double> least_seconds(void* stream, const std::vector<std::function<bool()>>& candidates);

}  // namespace inductor

#include "cuda_tuning.h"

#include "cuda_driver.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>

namespace inductor {
namespace {

constexpr int kRounds = 4, kMostLaunches = 20;
constexpr double kRoundSeconds = 1e-4;  // of a candidate: long enough for the events' resolution

}  // namespace

std::shared_ptr<ProductChoices> ProductChoices::of(const std::string& path) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<ProductChoices>> all;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& found = all[path];
  if (found == nullptr) found = std::make_shared<ProductChoices>(path);
  return found;
}

std::string ProductChoices::line(const std::string& key, const ProductChoice& choice) {
  std::ostringstream text;
  text << key << ' ';
  if (choice.aten) {
    text << "aten";
  } else {
    text << choice.workspace;
    for (const uint64_t word : choice.algorithm) text << ' ' << word;
  }
  text << " .\n";  // a line that was not written to its end has no full stop
  return text.str();
}

std::optional<std::pair<std::string, ProductChoice>> ProductChoices::read(const std::string& line) {
  std::istringstream text(line);
  std::string key, first, end;
  if (!(text >> key >> first)) return std::nullopt;
  ProductChoice choice;
  choice.aten = first == "aten";
  if (!choice.aten) {
    std::istringstream number(first);
    if (!(number >> choice.workspace) || !number.eof()) return std::nullopt;
    for (uint64_t& word : choice.algorithm) {
      if (!(text >> word)) return std::nullopt;
    }
  }
  if (!(text >> end) || end != "." || (text >> end)) return std::nullopt;
  return std::pair(key, choice);
}

void ProductChoices::load() {
  if (loaded_) return;
  loaded_ = true;
  std::ifstream file(path_);
  for (std::string text; std::getline(file, text);) {
    if (auto found = read(text)) known_.insert_or_assign(std::move(found->first), found->second);
  }
}

std::optional<ProductChoice> ProductChoices::find(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  load();
  const auto found = known_.find(key);
  return found == known_.end() ? std::nullopt : std::optional(found->second);
}

void ProductChoices::remember(const std::string& key, const ProductChoice& choice) {
  const std::lock_guard<std::mutex> lock(mutex_);
  load();
  known_.insert_or_assign(key, choice);
  std::ofstream file(path_, std::ios::app);
  file << line(key, choice) << std::flush;  // one write, which other processes' do not run into
}

std::vector<double> least_seconds(void* stream, const std::vector<std::function<bool()>>& candidates) {
  constexpr double forever = std::numeric_limits<double>::infinity();
  std::vector<double> least(candidates.size(), forever);
  std::vector<int> launches(candidates.size(), 0);
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (!candidates[i]()) continue;  // the first launch loads the kernel
    const double once = device_seconds(stream, [&] { candidates[i](); });
    launches[i] = std::clamp(static_cast<int>(std::ceil(kRoundSeconds / std::max(once, 1e-7))), 1, kMostLaunches);
  }
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (launches[i] == 0) continue;
      const double took = device_seconds(stream, [&] {
        for (int launch = 0; launch < launches[i]; ++launch) candidates[i]();
      });
      least[i] = std::min(least[i], took / launches[i]);
    }
  }
  return least;
}

}  // namespace inductor

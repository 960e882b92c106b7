// Runs a saved program as a C++ program does, and prints what came of it: `saved_program FOLDER`.
#include <torchinductor/program.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <fstream>
#include <iostream>
#include <thread>

namespace {

using torchinductor::Program;

at::Tensor example(int64_t rows) { return at::arange(rows * 8, at::kFloat).view({rows, 8}).div(rows * 8); }

void refused(const char* what, const Program& program, const std::vector<at::Tensor>& inputs) {
  try {
    program(inputs);
    std::cout << what << ": taken\n";
  } catch (const torchinductor::InputError& error) {
    std::cout << what << ": " << error.what() << "\n";
  }
}

// Whether calls from several threads at a time all give what one gives.
bool threads_agree(const Program& program) {
  std::atomic<int> equal = 0;
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      const at::Tensor input = example(3 + thread), expected = program({input})[0];
      for (int call = 0; call < 100; ++call) equal += at::equal(program({input})[0], expected);
    });
  }
  for (auto& thread : threads) thread.join();
  return equal == 400;
}

bool maps_python() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("python") != std::string::npos && line.find("libpython") != std::string::npos) return true;
    if (line.find("libtorch_python") != std::string::npos) return true;
  }
  return false;
}

}  // namespace

int main(int, char** arguments) try {
  const Program program = Program::load(arguments[1]);
  for (const auto& input : program.inputs()) {
    std::cout << input.name << " " << c10::toString(input.dtype) << " " << c10::IntArrayRef(input.sizes) << "\n";
  }
  for (const int64_t rows : {2, 5}) {
    const at::Tensor result = program({example(rows)})[0];
    std::ofstream file(std::string(arguments[1]) + "/result" + std::to_string(rows), std::ios::binary);
    file.write(static_cast<const char*>(result.const_data_ptr()), result.nbytes());
    std::cout << "result " << result.sizes() << " " << result.requires_grad() << "\n";
  }
  refused("none", program, {});
  refused("dtype", program, {example(2).to(at::kDouble)});
  refused("size", program, {example(2).slice(1, 0, 7)});
  refused("range", program, {example(65)});
  refused("strides", program, {example(8).t()});
  refused("undefined", program, {at::Tensor()});
  alignas(8) static char bytes[5 * 8 * 4 + 8];
  refused("address", program, {at::from_blob(bytes + 1, {5, 8}, at::kFloat)});
  {
    const c10::InferenceMode inference;
    std::cout << "inference " << at::equal(program({example(5)})[0], program({example(5)})[0]) << "\n";
  }
  std::cout << "gradients " << program({example(5).requires_grad_()})[0].requires_grad() << "\n";
  std::cout << "threads " << threads_agree(program) << "\n";
  std::cout << "python " << maps_python() << "\n";
} catch (const torchinductor::LoadError& error) {
  std::cout << "not loaded: " << error.what() << "\n";
  return 3;
}

// Runs a compiled program on images in a file, without Python: `program FOLDER IMAGES BATCH SCORES`.
#include <torchinductor/program.h>

#include <ATen/ops/empty.h>

#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>

int main(int count, char** arguments) try {
  if (count != 5) throw std::invalid_argument("usage: program FOLDER IMAGES BATCH SCORES");
  const auto program = torchinductor::Program::load(arguments[1]);
  for (const auto& input : program.inputs()) {
    std::cout << input.name << ": " << c10::toString(input.dtype) << " " << c10::IntArrayRef(input.sizes) << "\n";  // -1: any
  }

  const at::Tensor images = at::empty({std::atol(arguments[3]), 3, 32, 32});
  std::ifstream file(arguments[2], std::ios::binary);
  if (!file.read(static_cast<char*>(images.mutable_data_ptr()), images.nbytes())) throw std::runtime_error("too few images");

  const std::vector<at::Tensor> results = program({images});

  const at::Tensor scores = results[0].contiguous();
  std::ofstream(arguments[4], std::ios::binary).write(static_cast<const char*>(scores.const_data_ptr()), scores.nbytes());
  std::cout << "scores: " << scores.sizes() << "\n";
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}

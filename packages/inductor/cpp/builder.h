// Makes a program, one instruction a call. Nothing here is of Python: module.cpp calls it for `native.py`, and
// program_file.cpp for a file.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "program.h"

namespace inductor {

using Size = std::pair<bool, int64_t>;  // (is an index into the value table, the index or the integer itself)
using Sizes = std::vector<Size>;

class Builder {
 public:
  void input_tensor(std::string name, int32_t slot, c10::ScalarType dtype, c10::Device device, int64_t dim);
  void input_symbol(std::string name, int32_t symbol);
  void stream(std::function<void*()> getter) { program_->current_stream = std::move(getter); }
  // Products of matrices on a GPU are measured, and the choices kept in a file; of those that are added from now on.
  void tune_products(const std::string& path) { choices_ = ProductChoices::of(path); }
  void constant(int32_t slot, at::Tensor tensor) { program_->constants.emplace_back(slot, std::move(tensor)); }
  // A size program's place in the value table. Raises std::invalid_argument for what is none.
  int64_t value(const std::vector<std::pair<std::string, int64_t>>& steps, bool initial);

  // What profilers call the instruction that was added last.
  void label(std::string text) { program_->instructions.back().label = std::move(text); }

  void alloc(int32_t dst, const Sizes& shape, const Sizes& strides, c10::ScalarType dtype, c10::Device device, std::string name);
  void free(int32_t slot, std::string name) { add(Opcode::Free, std::move(name)).src = slot; }
  void view(int32_t dst, int32_t src, const Sizes& shape, const Sizes& strides, const Size& offset, c10::ScalarType dtype,
            std::string name);
  void claim(int32_t dst, int32_t src, const Sizes& shape, const Sizes& strides, c10::ScalarType dtype, c10::Device device,
             std::string name);
  void kernel(KernelFunction function, std::vector<int32_t> buffers, const Sizes& symbols, std::string name);
  void triton(std::shared_ptr<TritonKernel> handle, const Sizes& grid, std::vector<int32_t> buffers, std::vector<int32_t> written,
              const Sizes& symbols, c10::Device device, std::string name);
  // `given` are values as they come, which take the form that the operator's schema asks for: fixed ones hold None, bools,
  // integers, floats, complex numbers, texts, devices, tensors, or tuples of these for lists; lists have Kind::List.
  void aten(const std::string& op, const std::string& overload, const std::vector<Argument>& given,
            std::vector<Destination> destinations, std::vector<int32_t> refreshed, std::string name);
  void python(PythonCall call, std::vector<int32_t> slots, const Sizes& integers, std::vector<Destination> destinations,
              std::string name);
  void require(int32_t value, std::string name, std::string why);
  void read_scalar(int32_t symbol, int32_t src, std::vector<int32_t> refreshed, std::string name);
  void expect(int32_t slot, const Sizes& shape, const Sizes& strides, std::string source,
              std::function<void(const std::string&)> mended);
  void output(Output value) { program_->outputs.push_back(value); }
  void output_size(const Size& size);

  // The program, of so many slots and symbols; the builder begins anew.
  std::shared_ptr<Program> build(int32_t slots, int32_t symbols);

 private:
  Instruction& add(Opcode opcode, std::string name);
  void uses(c10::Device device);

  std::shared_ptr<Program> program_ = std::make_shared<Program>();
  std::shared_ptr<ProductChoices> choices_;
};

}  // namespace inductor

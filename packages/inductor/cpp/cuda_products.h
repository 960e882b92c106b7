// Products of matrices on a GPU, asked of cuBLASLt directly; the library is found at run time, nothing here links CUDA.
//
// ATen asks the library anew at each call how to multiply (in which layout, by which kernel), behind a dispatcher: the
// host of an H200 takes about twice as long for that as where it is asked once, for as long as sizes, strides, alignments
// and torch's flags stay what they are. What is not known to mean the same stays ATen's call, and so do large products to
// which no row is added: for these ATen calls cuBLAS, whose kernels are up to 15 % faster than those that cuBLASLt names
// first (8192 x 30528 x 768 in bfloat16: 553 and 628 us).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "cuda_tuning.h"

namespace inductor {

struct Argument;
struct Instruction;
struct Frame;

// A matrix, or a batch of them, as column-major memory.
struct ColumnMajor {
  int64_t rows = 0, columns = 0, leading = 0;
  int64_t batch_stride = 0;
  bool transposed = false;  // whether what is multiplied is this matrix's transpose

  bool operator==(const ColumnMajor&) const = default;
};

// What cuBLASLt is asked for: out = left * right, and what is added. As it takes memory for column-major and results here
// are row-major, `out` is the transpose of the result, `left` that of its second factor and `right` that of its first.
struct ProductLayout {
  ColumnMajor left, right, out;
  std::optional<ColumnMajor> added;  // a whole matrix; a row is added by `row`
  bool row = false;
  int64_t batch = 1;

  // Whether the host takes longer to ask ATen for it than the device to compute it, or ATen asks cuBLASLt as well.
  bool pays() const;

  bool operator==(const ProductLayout&) const = default;
};

// The layout of a (batch..., m, k) x (batch..., k, n) of two or three dims, and of what is added to it: a row of n
// numbers or a whole result. Nothing where one of these has strides (or no elements) that the library does not take.
std::optional<ProductLayout> product_layout(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& added);

// One call of a program.
class CudaProduct {
 public:
  // For `aten::mm`, `bmm`, and `addmm` or `baddbmm` that scale nothing; null for any other call.
  static std::shared_ptr<CudaProduct> of(const std::string& op, const std::vector<Argument>& arguments);
  ~CudaProduct();

  // From now on, what is not known yet is measured where it is first needed: ATen's call, which `aten` makes in `run`,
  // and the library's first few answers.
  void tune(std::shared_ptr<ProductChoices> choices) { choices_ = std::move(choices); }

  // Stores the result in the instruction's slot. False, and nothing is done, where ATen has to be called.
  bool run(const Instruction& in, Frame& frame, const std::function<void()>& aten);

  // Writes a @ b and a row that is added to each of its rows where `out` lies, whose rows may be apart. ATen would write
  // the row everywhere first, and read the result for it. False, and nothing is done, where ATen has to be called.
  static bool write(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& row);

 private:
  struct Plan;
  CudaProduct() = default;

  std::array<int32_t, 3> slots_{};  // the first factor's, the second's, and what is added or -1
  std::shared_ptr<ProductChoices> choices_;  // null: nothing is measured
  std::unique_ptr<Plan> plan_;  // of the last call; guarded by its device's mutex
};

}  // namespace inductor

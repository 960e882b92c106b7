// Matrix products of 16-bit numbers whose rows end at no multiple of what tensor cores store at a time.
//
// cuBLAS has slow kernels alone for a result of odd rows: 16384 x 768 x 50257 takes an H200 13.3 ms, and 1.8 ms where
// rows have 50264 elements; but these would have to be copied into the result that eager gives. Here it is written in
// place. Every g-th row begins where the first of them does, by a multiple of the unit: so the rows fall into g
// products whose leading dimension is that of g rows, each of whole units of columns from the first that is aligned in
// its rows. The few columns before and behind come from two narrow products. A row that is added costs no pass over the
// result: 32768 x 128 x 30522 is all memory, 2 GB of it.
#include "cuda_products.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

namespace inductor {
namespace {

// target = a @ b, and a row on each of its rows.
void write(at::Tensor target, const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& row) {
  if (!row) {
    at::mm_out(target, a, b);
  } else if (!CudaProduct::write(target, a, b, *row)) {
    at::addmm_out(target, *row, a, b);
  }
}

// A part of a row that begins as vector loads want it.
at::Tensor part_of(const at::Tensor& row, int64_t begin, int64_t width) {
  const at::Tensor part = row.narrow(0, begin, width);
  return reinterpret_cast<uintptr_t>(part.const_data_ptr()) % 16 == 0 ? part : part.clone();
}

// a (m, k), b (k, n), bias (n) -> (m, n), row-major. `unit`: elements that rows should begin at a multiple of.
at::Tensor odd_product(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias, int64_t unit) {
  const int64_t rows = a.size(0), columns = b.size(1), groups = unit / std::gcd(columns, unit);
  at::Tensor out = at::empty({rows, columns}, a.options());
  for (int64_t group = 0; group < std::min(groups, rows); ++group) {
    const int64_t begin = (unit - group * columns % unit) % unit, width = (columns - begin) / unit * unit;
    if (width <= 0) continue;
    const at::Tensor left = a.slice(0, group, rows, groups), right = b.narrow(1, begin, width);
    const at::Tensor target = out.as_strided({left.size(0), width}, {groups * columns, 1}, group * columns + begin);
    write(target, left, right, bias ? std::optional(part_of(*bias, begin, width)) : std::nullopt);
  }
  const int64_t edge = std::min(unit, columns);
  for (const int64_t begin : {int64_t{0}, columns - edge}) {
    const at::Tensor target = out.narrow(1, begin, edge), right = b.narrow(1, begin, edge);
    if (bias) {
      write(target, a, right, part_of(*bias, begin, edge));
    } else {
      target.copy_(at::mm(a, right));
    }
  }
  return out;
}

}  // namespace
}  // namespace inductor

TORCH_LIBRARY_FRAGMENT(torchinductor, library) {
  library.def("odd_product(Tensor a, Tensor b, Tensor? bias, int unit) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchinductor, CompositeExplicitAutograd, library) {
  library.impl("odd_product", TORCH_FN(inductor::odd_product));
}

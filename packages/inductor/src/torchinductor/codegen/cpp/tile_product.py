"""The product of small matrices in a thread's caches, as text that kernels which need it begin with."""

from __future__ import annotations

LANE_BYTES = 64  # of the widest vectors: rows of a product's right side are whole vectors of these, or of half of them

TILE_PRODUCT = """\
#ifndef TILE_PRODUCT
#define TILE_PRODUCT
#ifdef __AVX512F__
enum { LANE_BYTES = 64, ROWS = 6, VECTORS = 4 };
#else
enum { LANE_BYTES = 32, ROWS = 6, VECTORS = 2 };
#endif
template <class T> struct Lanes {
  typedef T type __attribute__((vector_size(LANE_BYTES), aligned(sizeof(T)), may_alias));
};
#ifndef __clang__
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif
// R rows and C vectors of `to`: the sums over p of left[m, p] * right[p, n].
template <class T, int R, int C> INLINE void product_tile(
    T* to, i64 row, const T* left, i64 down, i64 across, const T* right, i64 step, i64 depth, bool add) {
#ifdef __clang__
  #pragma clang fp contract(fast)
#endif
  typedef typename Lanes<T>::type V;
  enum { N = LANE_BYTES / sizeof(T) };
  V sums[R][C] = {};
  for (i64 p = 0; p < depth; p++) {
    V factors[C];
    #pragma GCC unroll 16
    for (int k = 0; k < C; k++) factors[k] = *(const V*)(right + p * step + k * N);
    #pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const T factor = left[r * down + p * across];
      #pragma GCC unroll 16
      for (int k = 0; k < C; k++) sums[r][k] = factor * factors[k] + sums[r][k];
    }
  }
  #pragma GCC unroll 16
  for (int r = 0; r < R; r++)
    #pragma GCC unroll 16
    for (int k = 0; k < C; k++) {
      V* at = (V*)(to + r * row + k * N);
      *at = add ? *at + sums[r][k] : sums[r][k];
    }
}
template <class T, int C> INLINE void product_columns(
    T* to, i64 row, const T* left, i64 down, i64 across, const T* right, i64 step, i64 rows, i64 depth, bool add) {
  i64 m = 0;
  for (; m + ROWS <= rows; m += ROWS)
    product_tile<T, ROWS, C>(to + m * row, row, left + m * down, down, across, right, step, depth, add);
  for (; m + 2 <= rows; m += 2)
    product_tile<T, 2, C>(to + m * row, row, left + m * down, down, across, right, step, depth, add);
  for (; m < rows; m++)
    product_tile<T, 1, C>(to + m * row, row, left + m * down, down, across, right, step, depth, add);
}
template <class T> static __attribute__((noinline)) void product(
    T* to, i64 row, const T* left, i64 down, i64 across, const T* right, i64 step, i64 rows, i64 width, i64 depth,
    bool add) {
  const i64 one = LANE_BYTES / sizeof(T), many = one * VECTORS;
  i64 n = 0;
  for (; n + many <= width; n += many)
    product_columns<T, VECTORS>(to + n, row, left, down, across, right + n, step, rows, depth, add);
  for (; n < width; n += one)
    product_columns<T, 1>(to + n, row, left, down, across, right + n, step, rows, depth, add);
}
#ifndef __clang__
#pragma GCC pop_options
#endif
// An exponential, or zero below the normal numbers (of -inf, say), which are dear to compute with, and for which the
// vector form of exp is a call for each element. Without a condition: the compiler would move the call behind it.
INLINE float exp_or_zero(float x) { const bool m = !(x < -87.0f); return keep(fexp(keep(x, m)), m); }
INLINE double exp_or_zero(double x) { const bool m = !(x < -708.0); return keep(exp(keep(x, m)), m); }
#endif
"""

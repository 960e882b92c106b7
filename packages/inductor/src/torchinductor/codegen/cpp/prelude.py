"""The fixed head of every generated translation unit: types, math declarations, scalar functions; no header."""

from __future__ import annotations

import platform

# Functions of libmvec by the glibc version that brought their vector forms.
_VECTOR_MATH = {
    (2, 22): "sin cos exp log",
    (2, 35): "tan asin acos atan sinh cosh tanh asinh acosh atanh exp2 expm1 log2 log10 log1p erf erfc",
}
_VECTOR_MATH_2 = {(2, 22): "pow", (2, 35): "atan2 hypot"}
_SCALAR_MATH_2 = "fmod nextafter"


def _declarations() -> str:
    name, version = platform.libc_ver()
    have = tuple(int(p) for p in version.split(".")[:2]) if name == "glibc" and version else (0, 0)
    if platform.machine() not in ("x86_64", "AMD64"):
        have = (0, 0)
    lines = []
    for table, arity in ((_VECTOR_MATH, 1), (_VECTOR_MATH_2, 2)):
        for since, names in table.items():
            attribute = '__attribute__((simd("notinbranch"))) ' if have >= since else ""
            for f in names.split():
                lines.append(
                    f"{attribute}float {f}f({', '.join(['float'] * arity)}) noexcept; "
                    f"{attribute}double {f}({', '.join(['double'] * arity)}) noexcept;"
                )
    if have >= (2, 35):
        lines.append("#define VECTOR_ERF")
    for f in _SCALAR_MATH_2.split():
        lines.append(f"float {f}f(float, float) noexcept; double {f}(double, double) noexcept;")
    return 'extern "C" {\n' + "\n".join(lines) + "\n}\n"


_TYPES = """\
typedef long i64; typedef unsigned long u64; typedef int i32; typedef unsigned int u32;
typedef short i16; typedef unsigned short u16; typedef signed char i8; typedef unsigned char u8;
#define INLINE static inline __attribute__((always_inline))
// Memory that g++ sees to be aligned within a function's frame. It aligns a frame as what it sees of accesses needs it,
// and does not see those by a register that an array's address was copied to: these would fault where they are aligned.
#if defined(__x86_64__) && !defined(__clang__)
#define ALIGNED_FRAME alignas(64) char frame; __asm__ volatile("" : : "m"(frame));
#else
#define ALIGNED_FRAME
#endif
"""

_FUNCTIONS = """\
INLINE float bf_load(u16 x) { return __builtin_bit_cast(float, (u32)x << 16); }
INLINE u16 bf_bits(float x) {
  u32 b = __builtin_bit_cast(u32, x);
  u32 r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return (u16)(x != x ? 0x7fc0u : r);
}
INLINE u16 bf_upper(float x) { return (u16)(__builtin_bit_cast(u32, x) >> 16); }  // of what is one already
INLINE float bf_round(float x) { return bf_load(bf_bits(x)); }
// Two selections each: a condition of two parts becomes a branch, and the loop around it stays scalar. The second asks
// about b, which is often a number of the program's text: then there is one.
template <class T> INLINE T max_nan(T a, T b) { T m = !(a <= b) ? a : b; return b != b ? b : m; }
template <class T> INLINE T min_nan(T a, T b) { T m = !(a >= b) ? a : b; return b != b ? b : m; }
template <class T> INLINE T imax(T a, T b) { return a > b ? a : b; }
template <class T> INLINE T imin(T a, T b) { return a < b ? a : b; }
template <class T> INLINE T fmax_(T a, T b) { T m = a > b ? a : b; return b != b ? a : m; }
template <class T> INLINE T fmin_(T a, T b) { T m = a < b ? a : b; return b != b ? a : m; }
template <class T> INLINE T idiv(T a, T b) {
  return b == 0 ? (T)0 : ((T)-1 < 0 && b == (T)-1) ? (T)(0 - a) : (T)(a / b);
}
template <class T> INLINE T imod(T a, T b) { return b == 0 || ((T)-1 < 0 && b == (T)-1) ? (T)0 : (T)(a % b); }
template <class T> INLINE T ifloor_div(T a, T b) {
  T q = idiv(a, b), r = imod(a, b);
  return (r != 0 && ((r < 0) != (b < 0))) ? (T)(q - 1) : q;
}
template <class T> INLINE T iremainder(T a, T b) {
  T r = imod(a, b);
  return (r != 0 && ((r < 0) != (b < 0))) ? (T)(r + b) : r;
}
template <class T> INLINE T floor_rest(T a, T b, T m) {
  if (b == 0) return a / b;
  T d = (a - m) / b;
  if (m != 0 && (b < 0) != (m < 0)) d -= 1;
  if (d == 0) return __builtin_copysign((T)0, a / b);
  T f = (T)__builtin_floor(d);
  return d - f > (T)0.5 ? f + 1 : f;
}
INLINE float ffloor_div(float a, float b) { return floor_rest<float>(a, b, fmodf(a, b)); }
INLINE double ffloor_div(double a, double b) { return floor_rest<double>(a, b, fmod(a, b)); }
INLINE float fremainder(float a, float b) {
  float m = fmodf(a, b); return (m != 0 && ((b < 0) != (m < 0))) ? m + b : m;
}
INLINE double fremainder(double a, double b) {
  double m = fmod(a, b); return (m != 0 && ((b < 0) != (m < 0))) ? m + b : m;
}
template <class T> INLINE T ipow(T a, T n) {
  if (n < 0) return a == 1 ? (T)1 : a == (T)-1 ? ((n & 1) ? (T)-1 : (T)1) : (T)0;
  T r = 1;
  while (n) { if (n & 1) r = (T)(r * a); a = (T)(a * a); n = (T)(n / 2); }
  return r;
}
template <class T> INLINE T igcd(T a, T b) {
  a = a < 0 ? (T)-a : a; b = b < 0 ? (T)-b : b;
  while (b) { T t = (T)(a % b); a = b; b = t; }
  return a;
}
template <class T> INLINE T ilcm(T a, T b) {
  T g = igcd(a, b); if (!g) return 0;
  T r = (T)(a / g * b); return r < 0 ? (T)-r : r;
}
template <class T> INLINE T shl(T a, T b) { return (b < 0 || b >= (T)(8 * sizeof(T))) ? (T)0 : (T)((u64)a << b); }
template <class T> INLINE T shr(T a, T b) {
  return (b < 0 || b >= (T)(8 * sizeof(T))) ? (T)(a < 0 ? -1 : 0) : (T)(a >> b);
}
// x where m, else zero, without a condition: the load before it stays unconditional and can be vectorised.
INLINE float keep(float x, bool m) { return __builtin_bit_cast(float, __builtin_bit_cast(u32, x) & (0u - (u32)m)); }
INLINE double keep(double x, bool m) { return __builtin_bit_cast(double, __builtin_bit_cast(u64, x) & (0ul - (u64)m)); }
template <class T> INLINE T keep(T x, bool m) { return (T)(x & (T)(0 - (T)m)); }
// Whether a takes b's place as the largest (the smallest) value: a NaN does from what is none.
template <bool LARGEST, class T> INLINE bool beats(T a, T b) {
  return (LARGEST ? a > b : a < b) | ((a != a) & (b == b));
}
// Where the first m stands among n values: all are looked at, by vectors.
template <class T> INLINE i64 first_of(const T* v, i32 n, T m) {
  i32 at = n;
  if (m != m) {
    #pragma omp simd reduction(min:at)
    for (i32 k = 0; k < n; k++) { const i32 here = v[k] != v[k] ? k : n; at = here < at ? here : at; }
  } else {
    #pragma omp simd reduction(min:at)
    for (i32 k = 0; k < n; k++) { const i32 here = v[k] == m ? k : n; at = here < at ? here : at; }
  }
  return at;
}
// Running sums in place, eight at a time, from `carry` on; returns the last.
template <class T, class W> INLINE W run_sum(T* v, i64 n, W carry) {
  i64 k = 0;
#if __has_builtin(__builtin_shufflevector)
  typedef W Vector __attribute__((vector_size(8 * sizeof(W))));
  const Vector none = {};
  for (; k + 8 <= n; k += 8) {
    Vector x;
    for (int j = 0; j < 8; j++) x[j] = (W)v[k + j];
    x += __builtin_shufflevector(none, x, 0, 8, 9, 10, 11, 12, 13, 14);
    x += __builtin_shufflevector(none, x, 0, 0, 8, 9, 10, 11, 12, 13);
    x += __builtin_shufflevector(none, x, 0, 0, 0, 0, 8, 9, 10, 11);
    const W all = x[7];
    x += carry;
    carry += all;
    for (int j = 0; j < 8; j++) v[k + j] = (T)x[j];
  }
#endif
  for (; k < n; k++) { carry += (W)v[k]; v[k] = (T)carry; }
  return carry;
}
template <int BYTES> struct Bits;
template <> struct Bits<1> { typedef u8 type; };
template <> struct Bits<2> { typedef u16 type; };
template <> struct Bits<4> { typedef u32 type; };
template <> struct Bits<8> { typedef u64 type; };
// a % m of an a that is less than twice m.
INLINE i64 wrap(i64 a, i64 m) { return a >= m ? a - m : a; }
// m ? a : b without a condition, for an m that does not change within a loop.
template <class T> INLINE T pick(bool m, T a, T b) {
  typedef typename Bits<sizeof(T)>::type U;
  const U mask = (U)(0 - (U)m);
  return __builtin_bit_cast(T, (U)((__builtin_bit_cast(U, a) & mask) | (__builtin_bit_cast(U, b) & (U)~mask)));
}
// b[r * to + c] = a[r + c * from]: eight by eight elements, in three rounds of exchanges between pairs of vectors.
template <class T> INLINE void turn_block(const T* a, i64 from, T* b, i64 to) {
#if __has_builtin(__builtin_shufflevector)
  typedef typename Bits<sizeof(T)>::type Vector __attribute__((vector_size(8 * sizeof(T))));
  Vector x[8], y[8];
  #pragma GCC unroll 8
  for (int k = 0; k < 8; k++) __builtin_memcpy(&x[k], a + k * from, sizeof(Vector));
  #pragma GCC unroll 8
  for (int k = 0; k < 8; k += 2) {
    y[k] = __builtin_shufflevector(x[k], x[k + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    y[k + 1] = __builtin_shufflevector(x[k], x[k + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  #pragma GCC unroll 8
  for (int k = 0; k < 8; k++) if (!(k & 2)) {
    x[k] = __builtin_shufflevector(y[k], y[k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    x[k + 2] = __builtin_shufflevector(y[k], y[k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  #pragma GCC unroll 8
  for (int k = 0; k < 4; k++) {
    y[k] = __builtin_shufflevector(x[k], x[k + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    y[k + 4] = __builtin_shufflevector(x[k], x[k + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  #pragma GCC unroll 8
  for (int k = 0; k < 8; k++) __builtin_memcpy(b + k * to, &y[k], sizeof(Vector));
#else
  for (int r = 0; r < 8; r++) for (int c = 0; c < 8; c++) b[r * to + c] = a[r + c * from];
#endif
}
// The same of a tile.
template <class T> static void turn(const T* a, i64 from, T* b, i64 to, i64 rows, i64 columns) {
  const i64 across = rows & -8, down = columns & -8;
  for (i64 c = 0; c < down; c += 8)
    for (i64 r = 0; r < across; r += 8) turn_block(a + r + c * from, from, b + r * to + c, to);
  for (i64 c = 0; c < columns; c++)
    for (i64 r = c < down ? across : 0; r < rows; r++) b[r * to + c] = a[r + c * from];
}
INLINE i64 floor_i(i64 a, i64 b) { i64 q = a / b; return q - ((a % b != 0) & ((a < 0) != (b < 0))); }
INLINE i64 mod_i(i64 a, i64 b) { i64 r = a % b; return r + ((r != 0) & ((r < 0) != (b < 0)) ? b : 0); }
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FUSED(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif
// exp to 1.2 units in the last place, without a call: x = n*log(2) + r, a polynomial of r, and 2^n by halves, so that
// what is less than the least normal number is rounded once.
INLINE float fexp(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float t = FUSED(x, 1.44269504f, 12582912.0f), n = t - 12582912.0f;
  const float r = FUSED(n, -1.42860677e-6f, FUSED(n, -0.693145752f, x));
  float p = FUSED(0.00138145f, r, 0.00836875f);
  p = FUSED(p, r, 0.04166839f);
  p = FUSED(p, r, 0.16666521f);
  p = FUSED(p, r, 0.49999994f);
  p = FUSED(FUSED(p, r, 1.0f), r, 1.0f);
  const i32 k = __builtin_bit_cast(i32, t) - 0x4b400000, h = k >> 1;
  return p * __builtin_bit_cast(float, (h + 127) << 23) * __builtin_bit_cast(float, (k - h + 127) << 23);
}
// erf to 2.2 units in the last place: 1 - exp(y), y = log(erfc(|x|)) = -|x| * (1 + a polynomial of |x|). As 1 - 2^n -
// 2^n * p it is -expm1(y) where that is small. libmvec's for 512 bits takes half as long again and is 4 units off, its
// others take less.
#if defined(VECTOR_ERF) && !defined(__AVX512F__)
INLINE float ferf(float x) { return erff(x); }
#else
INLINE float ferf(float x) {
  const i32 bits = __builtin_bit_cast(i32, x) & 0x7fffffff;
  const float a = __builtin_bit_cast(float, bits < 0x40800000 ? bits : 0x40800000);  // 1 from 4 on
  float u = FUSED(-4.07029693e-05f, a, 0.00038096332f);
  u = FUSED(u, a, -0.00125163794f);
  u = FUSED(u, a, -0.000205871664f);
  u = FUSED(u, a, 0.0193218309f);
  u = FUSED(u, a, -0.102814451f);
  u = FUSED(u, a, -0.636616468f);
  u = FUSED(u, a, -0.128379211f);
  const float y = FUSED(u, a, -a);
  // Of the sum's bits only the last nine, the exponent of 2^n, stay.
  const float t = FUSED(y, 1.44269504f, 12583039.0f), n = t - 12583039.0f;
  const float r = FUSED(n, -1.42860677e-6f, FUSED(n, -0.693145752f, y));
  float p = FUSED(0.00138145f, r, 0.00836875f);
  p = FUSED(p, r, 0.04166839f);
  p = FUSED(p, r, 0.16666521f);
  p = FUSED(p, r, 0.49999994f);
  p = FUSED(p * r, r, r);
  const float s = __builtin_bit_cast(float, __builtin_bit_cast(i32, t) << 23);
  const float e = __builtin_copysignf(FUSED(-s, p, 1.0f - s), x);
  return x != x ? x : e;
}
#endif
INLINE float log_add(float a, float b) {
  float hi = max_nan(a, b), lo = min_nan(a, b);
  return hi == lo && __builtin_isinf(hi) ? hi : hi + log1pf(expf(lo - hi));
}
INLINE double log_add(double a, double b) {
  double hi = max_nan(a, b), lo = min_nan(a, b);
  return hi == lo && __builtin_isinf(hi) ? hi : hi + log1p(exp(lo - hi));
}
// The block of Philox4x32-10 in c0 to c3. 32-bit words held in 64 bits: loops around it vectorise without packing.
INLINE void philox_block(i64 seed, u64 block, u64 stream, u64& c0, u64& c1, u64& c2, u64& c3) {
  const u64 low = 0xfffffffful;
  u64 k0 = (u64)seed & low, k1 = (u64)seed >> 32;
  c0 = block & low; c1 = block >> 32; c2 = stream; c3 = 0;
  #pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    const u64 p0 = 0xD2511F53ul * c0, p1 = 0xCD9E8D57ul * c2;
    c0 = (p1 >> 32) ^ c1 ^ k0; c2 = (p0 >> 32) ^ c3 ^ k1; c1 = p1 & low; c3 = p0 & low;
    k0 = (k0 + 0x9E3779B9ul) & low; k1 = (k1 + 0xBB67AE85ul) & low;
  }
}
INLINE i64 philox(i64 seed, i64 index, u32 stream) {
  u64 c0, c1, c2, c3;
  philox_block(seed, (u64)index >> 2, stream, c0, c1, c2, c3);
  const u64 even = index & 2 ? c2 : c0, odd = index & 2 ? c3 : c1;
  return (i64)(index & 1 ? odd : even);
}
// The words of `count` places from `start` on, of which a block has four. Returns where the first one is.
static const u32* philox_fill(i64 seed, i64 start, i64 count, u32 stream, u32* words) {
  const i64 first = start >> 2, blocks = ((start + count + 3) >> 2) - first;
  #pragma omp simd
  for (i64 k = 0; k < blocks; k++) {
    u64 c0, c1, c2, c3;
    philox_block(seed, (u64)(first + k), stream, c0, c1, c2, c3);
    words[4 * k] = (u32)c0; words[4 * k + 1] = (u32)c1; words[4 * k + 2] = (u32)c2; words[4 * k + 3] = (u32)c3;
  }
  return words + (start & 3);
}
"""


def prelude() -> str:
    """The text that every translation unit begins with."""
    return _TYPES + _declarations() + _FUNCTIONS

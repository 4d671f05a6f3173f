// Functions of single numbers, eight or sixteen at a time, and the FP8 quantizer.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "lanes.h"

namespace deepinfer {

// Memory that a thread keeps for its next call.
template <int Use>
float* scratch(int64_t count) {
  thread_local std::vector<float> kept;
  if (int64_t(kept.size()) < count) kept.resize(count);
  return kept.data();
}

// -- sixteen numbers, whose order nothing depends on ------------------------------------------------

constexpr int64_t kWide = 16;
typedef float Wide __attribute__((vector_size(4 * kWide)));
typedef int32_t WideWords __attribute__((vector_size(4 * kWide)));

template <class V>
struct WordsOf;
template <>
struct WordsOf<Lanes> {
  typedef Words type;
};
template <>
struct WordsOf<Wide> {
  typedef WideWords type;
};
template <class V>
using words_of = typename WordsOf<V>::type;

template <class V>
inline V all(float x) {
  return V{} + x;
}

inline Wide madd(Wide a, Wide b, Wide c) {
#if defined(__AVX512F__)
  return (Wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  Lanes x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; ++i) z[i] = madd(x[i], y[i], z[i]);
  std::memcpy(&c, z, sizeof c);
  return c;
#endif
}

inline Wide root(Wide x) {
#if defined(__AVX512F__)
  return (Wide)_mm512_maskz_sqrt_ps(0xFFFF, (__m512)x);
#else
  for (int i = 0; i < kWide; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// `some` <= 16 numbers, zeros behind them.
inline Wide wide(const float* p, int64_t some = kWide) {
  Wide value = {};
  std::memcpy(&value, p, some * sizeof(float));
  return value;
}

inline Wide wide(const uint16_t* p, int64_t some = kWide) {
  uint16_t bits[kWide] = {};
  if (some < kWide) p = (const uint16_t*)std::memcpy(bits, p, some * sizeof(uint16_t));
#if defined(__AVX512F__)
  const __m512i words = _mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_loadu_si256((const __m256i*)p));
  return (Wide)_mm512_maskz_slli_epi32(0xFFFF, words, 16);
#else
  Wide value;
  const Lanes halves[2] = {load(p), load(p + kLanes)};
  std::memcpy(&value, halves, sizeof value);
  return value;
#endif
}

template <class V>
inline V choose(words_of<V> mask, V yes, V no) {
  return (V)(((words_of<V>)yes & mask) | ((words_of<V>)no & ~mask));
}

template <class V>
inline V absolute(V x) {
  return (V)((words_of<V>)x & 0x7FFFFFFF);
}

template <class V>
inline V smaller(V a, V b) {  // a where one is NaN
  return choose<V>(b < a, b, a);
}

template <class V>
inline V larger(V a, V b) {  // a where one is NaN
  return choose<V>(b > a, b, a);
}

inline bool any(WideWords mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
  int32_t found = 0;
  for (int i = 0; i < kWide; ++i) found |= mask[i];
  return found;
#endif
}

inline float largest(Wide x) {
  Lanes halves[2];
  std::memcpy(halves, &x, sizeof x);
  const Lanes most = larger(halves[0], halves[1]);
  Half four[2];
  std::memcpy(four, &most, sizeof most);
  float found = most[0];
  for (int i = 0; i < 4; ++i) found = std::max(found, std::max(four[0][i], four[1][i]));
  return found;
}

// To bfloat16, to nearest, ties to even; NaN stays NaN.
inline Wide rounded(Wide x) {
  typedef uint32_t Bits __attribute__((vector_size(4 * kWide)));
  const Bits word = (Bits)x;
  const Bits up = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000u;
  return choose<Wide>(x == x, (Wide)up, (Wide)((word & 0xFFFF0000u) | 0x400000u));
}

// What a number is when it is stored as a T and read again.
template <class T>
inline Wide as_stored(Wide x) {
  return sizeof(T) == 2 ? rounded(x) : x;
}

inline void put(float* p, Wide value, int64_t some = kWide) {
  std::memcpy(p, &value, some * sizeof(float));
}

inline void put(uint16_t* p, Wide value, int64_t some = kWide) {  // rounded to bfloat16
  typedef uint16_t Halves __attribute__((vector_size(2 * kWide)));
  typedef uint32_t Bits __attribute__((vector_size(4 * kWide)));
  const Halves halves = __builtin_convertvector((Bits)rounded(value) >> 16, Halves);
  std::memcpy(p, &halves, some * sizeof(uint16_t));
}

// f(first, how many) of `count` numbers, sixteen at a time.
template <class F>
inline void each_wide(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kWide <= count; i += kWide) f(i, std::integral_constant<int64_t, kWide>{});
  if (i < count) f(i, count - i);
}

// -- functions -------------------------------------------------------------------------------------

// e^x of x <= 0, to about one unit in the last place; 0 below the smallest normal number.
template <class V>
inline V exponential(V x) {
  const auto tiny = x < all<V>(-87.0f);
  const V scaled = x * all<V>(1.44269504f) + all<V>(12582912.0f);  // 1.5 * 2^23: rounds to integer
  const V whole = scaled - all<V>(12582912.0f);
  V r = madd(whole, all<V>(-0.693359375f), x);
  r = madd(whole, all<V>(2.12194440e-4f), r);
  V y = all<V>(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    y = madd(y, r, all<V>(c));
  }
  const auto power = (__builtin_convertvector(whole, words_of<V>) + 127) << 23;
  y = y * (V)power;
  return (V)((words_of<V>)y & ~tiny);
}

template <class V>
inline V sigmoid(V x) {  // 1 / (1 + e) above 0, e / (1 + e) below
  const V e = exponential(-absolute(x)), one = all<V>(1.0f);
  return choose<V>(x < all<V>(0.0f), e, one) / (one + e);
}

// log(1 + e^x), to a few units in the last place.
template <class V>
inline V softplus(V x) {
  const V e = exponential(-absolute(x));
  const V s = e / (all<V>(2.0f) + e), square = s * s;  // log(1 + e) = 2 artanh(s), s <= 1/3
  V y = all<V>(1.0f / 15);
  for (const float c : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) {
    y = madd(y, square, all<V>(c));
  }
  return larger(x, all<V>(0.0f)) + all<V>(2.0f) * s * y;
}

// -- FP8 in groups of 32, as `quant.qdq_fp8` -------------------------------------------------------

constexpr int64_t kGroup = 32;

// The nearest e4m3 number of |x| <= 448, ties to even; NaN stays NaN.
inline Wide nearest_e4m3(Wide x) {
  const WideWords bits = (WideWords)x;
  const Wide normal = (Wide)((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF);
  const Wide shift = all<Wide>(12582912.0f);
  const Wide whole = (x * all<Wide>(512.0f) + shift) - shift;
  const WideWords sign = bits & int32_t(0x80000000);
  const Wide fine = (Wide)((WideWords)(whole * all<Wide>(1.0f / 512)) | sign);
  // Rounding the bits of a NaN could carry into its sign and leave a number.
  return choose<Wide>(x == x, choose<Wide>(absolute(x) < all<Wide>(0.015625f), fine, normal), x);
}

// x [k], k a multiple of 32, quantized and decoded in its place; a group that has an infinity is NaN.
inline void quantize_fp8(float* x, int64_t k) {
  for (int64_t g = 0; g < k; g += kGroup, x += kGroup) {
    const Wide low = wide(x), high = wide(x + kWide);
    const Wide size = larger(absolute(low), absolute(high));
    const float most = std::max(1e-4f, largest(size)) * (1.0f / 448);
    uint32_t bits;
    std::memcpy(&bits, &most, 4);
    bits = (bits + 0x7FFFFF) & 0xFF800000u;  // the power of two that is not smaller
    const uint32_t inverse = bits < 0x7F000000u ? 0x7F000000u - bits : 0;
    float scale, by;
    std::memcpy(&scale, &bits, 4);
    std::memcpy(&by, &inverse, 4);
    const auto trip = [&](Wide v) {
      v = smaller(v * all<Wide>(by), all<Wide>(448.0f));
      v = larger(v, all<Wide>(-448.0f));
      return nearest_e4m3(v) * all<Wide>(scale);
    };
    put(x, trip(low));
    put(x + kWide, trip(high));
  }
}

}  // namespace deepinfer

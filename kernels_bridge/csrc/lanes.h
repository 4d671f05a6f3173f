// Eight float32 lanes, their sum in one order, and bfloat16.
//
// Normal products of two bfloat16 numbers are exact in float32, so a fused multiply-add gives them the
// same bits as two operations; of float32 operands `madd` is one operation wherever it stands. Compile
// with -ffp-contract=off, so that no other multiplication joins an addition.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepinfer {

constexpr int64_t kLanes = 8;

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t Words __attribute__((vector_size(4 * kLanes)));

inline Lanes splat(float x) { return Lanes{} + x; }

inline Lanes madd(Lanes a, Lanes b, Lanes c) {
#if defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

typedef float Half __attribute__((vector_size(2 * kLanes)));

// Lanes I, J, K, L of a and, counted from Count on, of b.
template <int Count, int I, int J, int K, int L, class V>
inline Half pick(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I, J, K, L);
#else
  const auto lane = [&](int i) { return i < Count ? a[i] : b[i - Count]; };
  return Half{lane(I), lane(J), lane(K), lane(L)};
#endif
}

inline Half fold(Lanes a) { return pick<8, 0, 1, 2, 3>(a, a) + pick<8, 4, 5, 6, 7>(a, a); }

// Each one's sum over its lanes: ((0+4) + (2+6)) + ((1+5) + (3+7)).
inline Half totals(Lanes a, Lanes b, Lanes c, Lanes d) {
  const Half fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
  const Half ab = pick<4, 0, 4, 1, 5>(fa, fb) + pick<4, 2, 6, 3, 7>(fa, fb);
  const Half cd = pick<4, 0, 4, 1, 5>(fc, fd) + pick<4, 2, 6, 3, 7>(fc, fd);
  return pick<4, 0, 1, 4, 5>(ab, cd) + pick<4, 2, 3, 6, 7>(ab, cd);
}

inline float total(Lanes a) { return totals(a, a, a, a)[0]; }

// -- bfloat16 --------------------------------------------------------------------------------------

inline float widen(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline float widen(float value) { return value; }

inline uint16_t narrow(float value) {  // to nearest, ties to even; NaN stays NaN
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if (value != value) return uint16_t((word >> 16) | 0x40);
  return uint16_t((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
}

inline float rounded(float value) { return widen(narrow(value)); }

inline Lanes rounded(Lanes value) {
  typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
  const Bits word = (Bits)value;
  const Bits up = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000u;
  const Words number = value == value;  // not NaN
  return (Lanes)((up & (Bits)number) | (((word & 0xFFFF0000u) | 0x400000u) & ~(Bits)number));
}

inline Lanes load(const float* p) {
  Lanes value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline Lanes load(const uint16_t* p) {
#if defined(__AVX2__)  // what GCC 12 makes of the conversion below is several times slower
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return (Lanes)_mm256_slli_epi32(words, 16);
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  return (Lanes)words;
#endif
}

// The last `count` < kLanes numbers of a row, zeros behind them.
template <class T>
inline Lanes load_tail(const T* p, int64_t count) {
  float values[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) values[i] = widen(p[i]);
  return load(values);
}

inline int64_t padded(int64_t k) { return (k + kLanes - 1) / kLanes * kLanes; }

// `rows` rows of k numbers, `stride` apart, as float32 padded with zeros to whole lanes.
template <class T>
void unpack(const T* x, int64_t rows, int64_t stride, int64_t k, float* out) {
  const int64_t width = padded(k), whole = k / kLanes * kLanes;
  for (int64_t r = 0; r < rows; ++r, x += stride, out += width) {
    for (int64_t i = 0; i < whole; i += kLanes) {
      const Lanes value = load(x + i);
      std::memcpy(out + i, &value, sizeof value);
    }
    if (whole < k) {
      const Lanes value = load_tail(x + whole, k - whole);
      std::memcpy(out + whole, &value, sizeof value);
    }
  }
}

}  // namespace deepinfer

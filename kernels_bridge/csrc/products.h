// Products of rows: each sum in eight lanes over ascending blocks of eight, then a tree over the
// lanes, whatever the number of rows and columns.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "lanes.h"

namespace deepinfer {

// out[m * row_stride + n] for M rows of unpacked x and N columns of w [., k].
template <int M, int N, class W>
inline void block(const float* x, const W* w, int64_t k, float* out, int64_t row_stride) {
  const int64_t width = padded(k), whole = k / kLanes * kLanes;
  Lanes sums[M][N] = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes column[N];
    for (int n = 0; n < N; ++n) column[n] = load(w + n * k + i);
    for (int m = 0; m < M; ++m) {
      const Lanes row = load(x + m * width + i);
      for (int n = 0; n < N; ++n) sums[m][n] = madd(row, column[n], sums[m][n]);
    }
  }
  if (whole < k) {
    for (int n = 0; n < N; ++n) {
      const Lanes column = load_tail(w + n * k + whole, k - whole);
      for (int m = 0; m < M; ++m) sums[m][n] = madd(load(x + m * width + whole), column, sums[m][n]);
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int m = 0; m < M; m += 4) {
      const int last = M - 1;
      const Half all = totals(sums[m][n], sums[std::min(m + 1, last)][n],
                              sums[std::min(m + 2, last)][n], sums[std::min(m + 3, last)][n]);
      for (int i = 0; i < 4 && m + i < M; ++i) out[(m + i) * row_stride + n] = all[i];
    }
  }
}

#if defined(__AVX512F__) && defined(__AVX512DQ__)

// Eight lanes each of two columns: the sums are those of `block`, two to a register.
inline __m512 two(const float* low, const float* high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(low)), _mm256_loadu_ps(high), 1);
}

inline __m512 two(const uint16_t* low, const uint16_t* high) {
  const __m256i halves = _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)low)),
      _mm_loadu_si128((const __m128i*)high), 1);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// `block` of an even number of columns whose k fills its lanes.
template <int M, int N, class W>
inline void pairs(const float* x, const W* w, int64_t k, float* out, int64_t row_stride) {
  static_assert(N % 2 == 0);
  __m512 sums[M][N / 2];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N / 2; ++n) sums[m][n] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < k; i += kLanes) {
    __m512 column[N / 2];
    for (int n = 0; n < N / 2; ++n) column[n] = two(w + 2 * n * k + i, w + (2 * n + 1) * k + i);
    for (int m = 0; m < M; ++m) {
      const __m512 row = _mm512_broadcast_f32x8(_mm256_loadu_ps(x + m * k + i));
      for (int n = 0; n < N / 2; ++n) sums[m][n] = _mm512_fmadd_ps(row, column[n], sums[m][n]);
    }
  }
  const auto low = [](__m512 a) { return (Lanes)_mm512_castps512_ps256(a); };
  const auto high = [](__m512 a) { return (Lanes)_mm512_extractf32x8_ps(a, 1); };
  for (int m = 0; m < M; ++m) {
    int n = 0;
    for (; n + 2 <= N / 2; n += 2) {
      const __m512 a = sums[m][n], b = sums[m][n + 1];
      const Half all = totals(low(a), high(a), low(b), high(b));
      std::memcpy(out + m * row_stride + 2 * n, &all, sizeof all);
    }
    if (n < N / 2) {
      const __m512 a = sums[m][n];
      const Half all = totals(low(a), high(a), low(a), high(a));
      std::memcpy(out + m * row_stride + 2 * n, &all, 2 * sizeof(float));
    }
  }
}

constexpr int kTallest = 12;  // rows at once: with four columns they fill the registers

// Columns at once: sums enough to hide one's latency, no more than there are registers for.
constexpr int columns_for(int rows) { return rows > 6 ? 4 : rows > 1 ? 8 : 16; }

template <int M, int N, class W>
inline void columns_of(const float* x, const W* w, int64_t k, float* out, int64_t row_stride) {
  if (k % kLanes == 0) {
    pairs<M, N>(x, w, k, out, row_stride);
  } else {
    for (int n = 0; n < N; ++n) block<M, 1>(x, w + n * k, k, out + n, row_stride);
  }
}

#else

constexpr int kTallest = 6;

// As many columns at once as keep twelve sums or fewer in registers, and no fewer than hide a sum's
// latency.
constexpr int columns_for(int rows) { return rows >= 4 ? 2 : rows >= 2 ? 4 : 8; }

template <int M, int N, class W>
inline void columns_of(const float* x, const W* w, int64_t k, float* out, int64_t row_stride) {
  block<M, N>(x, w, k, out, row_stride);
}

#endif

template <int M, class W>
void strip(const float* x, const W* w, int64_t k, int64_t columns, float* out, int64_t row_stride) {
  constexpr int kColumns = columns_for(M);
  int64_t n = 0;
  for (; n + kColumns <= columns; n += kColumns) {
    columns_of<M, kColumns>(x, w + n * k, k, out + n, row_stride);
  }
  for (; n < columns; ++n) block<M, 1>(x, w + n * k, k, out + n, row_stride);
}

// Unpacked x [rows, padded k] times w [columns, k]; out [rows, row_stride].
template <class W>
void multiply(const float* x, int64_t rows, const W* w, int64_t k, int64_t columns, float* out,
              int64_t row_stride) {
  const int64_t width = padded(k);
  const auto next = [&](int64_t taken) {
    rows -= taken;
    x += taken * width;
    out += taken * row_stride;
  };
  for (; rows >= kTallest; next(kTallest)) strip<kTallest>(x, w, k, columns, out, row_stride);
  if (kTallest > 8 && rows >= 8) {
    strip<8>(x, w, k, columns, out, row_stride);
    next(8);
  }
  if (rows >= 4) {
    strip<4>(x, w, k, columns, out, row_stride);
    next(4);
  }
  if (rows == 3) strip<3>(x, w, k, columns, out, row_stride);
  if (rows == 2) strip<2>(x, w, k, columns, out, row_stride);
  if (rows == 1) strip<1>(x, w, k, columns, out, row_stride);
}

// Of H rows of p, `stride` apart: out [H, V] = sum over s, ascending, of p[s] * keys[s * width ..].
template <int H, int N, class V>
inline void combine_block(const float* p, int64_t stride, const float* keys, int64_t count,
                          int64_t width, float* out) {
  constexpr int64_t kStep = sizeof(V) / sizeof(float);
  V sums[H][N] = {};
  for (int64_t s = 0; s < count; ++s) {
    V key[N];
    std::memcpy(key, keys + s * width, sizeof key);
    for (int h = 0; h < H; ++h) {
      const V weight = V{} + p[h * stride + s];
      for (int n = 0; n < N; ++n) sums[h][n] = madd(weight, key[n], sums[h][n]);
    }
  }
  for (int h = 0; h < H; ++h) std::memcpy(out + h * width, sums[h], N * kStep * sizeof(float));
}

// The same for all of `heads` rows and a width of whole lanes.
template <int H>
inline void combine_rows(const float* p, int64_t stride, const float* keys, int64_t count,
                         int64_t width, float* out) {
  int64_t i = 0;
  for (; i + 4 * kWide <= width; i += 4 * kWide) {
    combine_block<H, 4, Wide>(p, stride, keys + i, count, width, out + i);
  }
  for (; i < width; i += kLanes) {
    combine_block<H, 1, Lanes>(p, stride, keys + i, count, width, out + i);
  }
}

inline void combine(const float* p, int64_t stride, int64_t heads, const float* keys, int64_t count,
                    int64_t width, float* out) {
#if defined(__AVX512F__)
  constexpr int kMost = 6;  // rows whose sums registers hold
#else
  constexpr int kMost = 1;
#endif
  int64_t h = 0;
  for (; h + kMost <= heads; h += kMost) {
    combine_rows<kMost>(p + h * stride, stride, keys, count, width, out + h * width);
  }
  for (; h < heads; ++h) combine_rows<1>(p + h * stride, stride, keys, count, width, out + h * width);
}

}  // namespace deepinfer

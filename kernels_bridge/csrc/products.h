// Products of rows: each sum in eight lanes over ascending blocks of eight, then a tree over the
// lanes, whatever the number of rows and columns.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

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

// As many columns at once as keep twelve sums or fewer in registers, and no fewer than hide a sum's
// latency.
template <int M, class W>
void strip(const float* x, const W* w, int64_t k, int64_t columns, float* out, int64_t row_stride) {
  constexpr int kColumns = M >= 4 ? 2 : M >= 2 ? 4 : 8;
  int64_t n = 0;
  for (; n + kColumns <= columns; n += kColumns) {
    block<M, kColumns>(x, w + n * k, k, out + n, row_stride);
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
  if (rows % 6 == 0) {
    for (; rows; next(6)) strip<6>(x, w, k, columns, out, row_stride);
  }
  for (; rows >= 4; next(4)) strip<4>(x, w, k, columns, out, row_stride);
  if (rows == 3) strip<3>(x, w, k, columns, out, row_stride);
  if (rows == 2) strip<2>(x, w, k, columns, out, row_stride);
  if (rows == 1) strip<1>(x, w, k, columns, out, row_stride);
}

// out [J lanes] = sum over s, ascending, of p[s] * keys[s * width ..].
template <int J>
inline void combine(const float* p, const float* keys, int64_t count, int64_t width, float* out) {
  Lanes sums[J] = {};
  for (int64_t s = 0; s < count; ++s) {
    const Lanes weight = splat(p[s]);
    for (int j = 0; j < J; ++j) {
      sums[j] = madd(weight, load(keys + s * width + j * kLanes), sums[j]);
    }
  }
  std::memcpy(out, sums, sizeof sums);
}

}  // namespace deepinfer

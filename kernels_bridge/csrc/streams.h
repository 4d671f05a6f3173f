// Hyper-connections: mixes of residual streams, and what they do to the streams of a row.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "norms.h"

namespace deepinfer {

constexpr int64_t kMostStreams = 8;

// m [c * c], [source, dest], each of sixteen rows: softmax over dest, then alternate normalisations,
// ending over source. C is known where it is usual, else `streams`.
template <int C>
inline void normalise(Wide* m, int64_t streams, int64_t turns, float eps) {
  const int64_t c = C ? C : streams;
  const Wide one = all<Wide>(1.0f), more = all<Wide>(eps);
  const auto over = [&](int64_t first, int64_t step, Wide sum) {
    for (int64_t i = 0; i < c; ++i) sum += m[first + i * step];
    const Wide by = one / sum;
    for (int64_t i = 0; i < c; ++i) m[first + i * step] *= by;
  };
  for (int64_t s = 0; s < c; ++s) {
    Wide top = m[s * c];
    for (int64_t d = 1; d < c; ++d) top = larger(top, m[s * c + d]);
    for (int64_t d = 0; d < c; ++d) m[s * c + d] = exponential(m[s * c + d] - top);
    over(s * c, 1, Wide{});
  }
  for (int64_t i = 0; i < c * c; ++i) m[i] += more;
  for (int64_t d = 0; d < c; ++d) over(d, c, more);
  for (int64_t turn = 1; turn < turns; ++turn) {
    for (int64_t s = 0; s < c; ++s) over(s * c, 1, more);
    for (int64_t d = 0; d < c; ++d) over(d, c, more);
  }
}

// raw [rows, c(2 + c)], rows <= 16, scale [3], base [c(2 + c)] -> pre, post [rows, c], comb
// [rows, c, c].
inline void mixes_of(const float* raw, const float* scale, const float* base, float* pre,
                     float* post, float* comb, int64_t rows, int64_t c, int64_t turns, float eps) {
  const int64_t width = c * (2 + c);
  Wide values[kMostStreams * (2 + kMostStreams)];
  for (int64_t n = 0; n < width; ++n) {
    Wide value = {};
    for (int64_t r = 0; r < rows; ++r) value[r] = raw[r * width + n];
    values[n] = value * all<Wide>(scale[std::min<int64_t>(n / c, 2)]) + all<Wide>(base[n]);
  }
  const auto write = [&](float* out, int64_t stride, int64_t at, Wide value) {
    for (int64_t r = 0; r < rows; ++r) out[r * stride + at] = value[r];
  };
  for (int64_t i = 0; i < c; ++i) {
    write(pre, c, i, sigmoid(values[i]) + all<Wide>(eps));
    write(post, c, i, all<Wide>(2.0f) * sigmoid(values[c + i]));
  }
  Wide* m = values + 2 * c;
  c == 4 ? normalise<4>(m, c, turns, eps) : normalise<0>(m, c, turns, eps);
  for (int64_t i = 0; i < c * c; ++i) write(comb, c * c, i, m[i]);
}

// The streams [c, d] weighted by pre [c], as they are stored, then normalised.
template <class X, class W>
inline void collapse_row(const float* pre, const X* streams, const W* weight, int64_t c, int64_t d,
                         float eps, float* memory, X* out) {
  each_wide(d, [&](int64_t i, auto some) {
    Wide sum = all<Wide>(pre[0]) * wide(streams + i, some);
    for (int64_t s = 1; s < c; ++s) sum += all<Wide>(pre[s]) * wide(streams + s * d + i, some);
    put(memory + i, as_stored<X>(sum), some);
  });
  norm_row(memory, weight, d, eps, out);
}

// post [c] * y [d] + comb [source, dest] applied to the streams -> [c, d].
template <class X>
inline void expand_row(const X* y, const float* post, const float* comb, const X* streams,
                       int64_t c, int64_t d, X* out) {
  each_wide(d, [&](int64_t i, auto some) {
    const Wide own = wide(y + i, some);
    Wide old[kMostStreams];
    for (int64_t s = 0; s < c; ++s) old[s] = wide(streams + s * d + i, some);
    for (int64_t to = 0; to < c; ++to) {
      Wide sum = all<Wide>(comb[to]) * old[0];
      for (int64_t from = 1; from < c; ++from) sum += all<Wide>(comb[from * c + to]) * old[from];
      put(out + to * d + i, all<Wide>(post[to]) * own + sum, some);
    }
  });
}

}  // namespace deepinfer

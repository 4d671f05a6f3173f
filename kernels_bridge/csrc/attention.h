// Attention of one row over keys in their order.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "products.h"
#include "threads.h"

namespace deepinfer {

// e^x of x <= 0, to about one unit in the last place; 0 below the smallest normal number.
inline Lanes exponential(Lanes x) {
  const Words tiny = x < splat(-87.0f);
  const Lanes scaled = x * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: rounds to integer
  const Lanes whole = scaled - splat(12582912.0f);
  Lanes r = madd(whole, splat(-0.693359375f), x);
  r = madd(whole, splat(2.12194440e-4f), r);
  Lanes y = splat(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    y = madd(y, r, splat(c));
  }
  const Words power = (__builtin_convertvector(whole, Words) + 127) << 23;
  y = y * (Lanes)power;
  return (Lanes)((Words)y & ~tiny);
}

struct Attention {
  int64_t heads, width, slots;
  float scale;
  bool narrow;  // whether probabilities are rounded to bfloat16

  int64_t keys() const { return heads * padded(width); }  // where they begin in the scratch
  int64_t scratch() const {
    return keys() + (slots + 1) * padded(width) + heads * padded(slots);
  }
};

// One row over its first `seen` keys, which stand unpacked in the scratch: q [H, K], sink [H] -> out
// [H, K].
template <class T>
void attend_row(const Attention& a, const T* q, int64_t seen, const float* sink, float* scratch,
                float* out) {
  const int64_t width = padded(a.width), lanes = padded(a.slots);
  float* wide_q = scratch;
  float* keys = scratch + a.keys();
  float* p = keys + a.slots * width;     // [H, lanes]
  float* value = p + a.heads * lanes;    // [width]
  unpack(q, a.heads, a.width, a.width, wide_q);
  multiply(wide_q, a.heads, keys, width, seen, p, lanes);
  for (int64_t h = 0; h < a.heads; ++h) {
    float* row = p + h * lanes;
    float top = -std::numeric_limits<float>::infinity();
    for (int64_t s = 0; s < seen; ++s) {
      row[s] *= a.scale;
      top = std::max(top, row[s]);
    }
    if (!std::isfinite(top)) top = 0;
    const int64_t end = padded(seen);
    std::fill(row + seen, row + end, -std::numeric_limits<float>::infinity());
    Lanes sum = {};
    for (int64_t s = 0; s < end; s += kLanes) {
      Lanes e = exponential(load(row + s) - splat(top));
      sum += e;
      if (a.narrow) e = rounded(e);
      std::memcpy(row + s, &e, sizeof e);
    }
    const float z = total(sum) + std::exp(sink[h] - top);
    int64_t i = 0;
    for (; i + 8 * kLanes <= width; i += 8 * kLanes) {
      combine<8>(row, keys + i, seen, width, value + i);
    }
    for (; i < width; i += kLanes) combine<1>(row, keys + i, seen, width, value + i);
    for (i = 0; i < a.width; ++i) out[h * a.width + i] = value[i] / z;
  }
}

// f(row, scratch) for every row, a few rows of a part.
template <class F>
void over_rows(ffi::ThreadPool pool, const Attention& a, int64_t rows, const F& f) {
  constexpr int64_t kAtOnce = 8;
  const int64_t parts = (rows + kAtOnce - 1) / kAtOnce;
  in_parts(pool, parts, 2 * rows * a.heads * a.width * a.slots, [&](int64_t part) {
    std::vector<float> scratch(a.scratch());
    const int64_t end = std::min(rows, (part + 1) * kAtOnce);
    for (int64_t r = part * kAtOnce; r < end; ++r) f(r, scratch.data());
  });
}

}  // namespace deepinfer

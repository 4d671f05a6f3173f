// Index scores of one row.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "products.h"

namespace deepinfer {

enum Rounding : int64_t { kNone = 0, kOnce = 1, kReference = 2 };

// Sum over heads, ascending, of relu(s[h * stride]) * gain[h] for `some` neighbouring entries.
template <Rounding rounding>
inline Lanes over_heads(const float* s, const float* gain, int64_t heads, int64_t stride,
                        int64_t some) {
  Lanes sum = {};
  for (int64_t h = 0; h < heads; ++h, s += stride) {
    Lanes term = some == kLanes ? load(s) : load_tail(s, some);
    if (rounding == kReference) term = rounded(term);
    term = (Lanes)((Words)term & ~(term <= splat(0.0f))) * splat(gain[h]);
    if (rounding == kReference) term = rounded(term);
    sum += term;
  }
  return rounding == kNone ? sum : rounded(sum);
}

// From products s [heads, count] of one row's queries with keys.
inline void sum_heads(const float* s, const float* gain, int64_t heads, int64_t count,
                      int64_t rounding, float* out) {
  for (int64_t n = 0; n < count; n += kLanes) {
    const int64_t some = std::min(kLanes, count - n);
    const Lanes sum = rounding == kNone   ? over_heads<kNone>(s + n, gain, heads, count, some)
                      : rounding == kOnce ? over_heads<kOnce>(s + n, gain, heads, count, some)
                                          : over_heads<kReference>(s + n, gain, heads, count, some);
    std::memcpy(out + n, &sum, some * sizeof(float));
  }
}

// Scores [count] of one row's unpacked queries for `count` keys.
template <class T>
void score_row(const float* q, const float* gain, int64_t heads, int64_t k, const T* keys,
               int64_t count, int64_t rounding, float* scratch, float* out) {
  multiply(q, heads, keys, k, count, scratch, count);
  sum_heads(scratch, gain, heads, count, rounding, out);
}

}  // namespace deepinfer

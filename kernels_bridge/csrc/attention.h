// Attention of one row over keys in their order.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "elements.h"
#include "pages.h"
#include "products.h"

namespace deepinfer {

struct Attention {
  int64_t heads, width, slots;
  float scale;
  bool narrow;  // whether probabilities are rounded to bfloat16

  int64_t keys() const { return heads * padded(width); }  // where they begin in the scratch
  int64_t scratch() const {
    return keys() + slots * padded(width) + heads * (padded(slots) + padded(width) + 1);
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
  float* value = p + a.heads * lanes;    // [H, width]
  float* z = value + a.heads * width;    // [H]
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
    z[h] = total(sum) + std::exp(sink[h] - top);
  }
  combine(p, lanes, a.heads, keys, seen, width, value);
  for (int64_t h = 0; h < a.heads; ++h) {
    for (int64_t i = 0; i < a.width; ++i) out[h * a.width + i] = value[h * width + i] / z[h];
  }
}

// Where a call's window vectors and entries lie: fresh [count, K] of all its rows; ring [B, R, K] of one
// layer as it was before the call; first and start [B], the first row and its position of each slot;
// entries as in `Pages`.
template <class X, class E>
struct Reach {
  const X* fresh;
  int64_t count;
  const E* ring;
  int64_t turns;
  const int32_t *first, *start;
  Pages<E> entries;
  int64_t window, picked, width;

  // Unpacks the keys of a row at `last` of a slot in their order: window positions from `floor` on,
  // then the entries `selected` [picked], -1: none. Returns how many there are.
  int64_t collect(int64_t slot, int64_t last, int64_t floor, const int32_t* selected,
                  float* keys) const {
    float* next = keys;
    const auto take = [&](const auto* key) {
      unpack(key, 1, width, width, next);
      next += padded(width);
    };
    for (int64_t at = std::max({last - window + 1, floor, int64_t{0}}); at <= last; ++at) {
      if (at >= start[slot]) {
        take(fresh + std::clamp<int64_t>(first[slot] + at - start[slot], 0, count - 1) * width);
      } else {
        take(ring + (slot * turns + at % turns) * width);
      }
    }
    for (int64_t s = 0; s < picked; ++s) {
      if (selected[s] >= 0) take(entries.at(slot, selected[s]));
    }
    return (next - keys) / padded(width);
  }
};

}  // namespace deepinfer

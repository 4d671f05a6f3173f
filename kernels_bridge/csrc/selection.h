// The largest of a row, in a total order: value, NaN above all, then the lower column; -0 equals +0.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "elements.h"

namespace deepinfer {

// A place in that order: smaller keys come first.
inline uint64_t place_of(float value, int64_t column) {
  uint32_t bits;
  value += 0.0f;  // of -0 this makes +0
  std::memcpy(&bits, &value, 4);
  if (value != value) bits = 0x7FFFFFFF;
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(~ascending) << 32 | uint64_t(column);
}

// The columns of the k best of n, best first. What cannot be among them is passed over sixteen at a
// time; what can is kept until there are twice as many as asked for, and then the better half.
inline void choose_best(const float* x, int64_t n, int64_t k, int32_t* columns) {
  if (!k) return;
  thread_local std::vector<uint64_t> kept;
  kept.clear();
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  float least = kNothing;  // what is no better is not kept: a later column never wins a tie
  const auto halve = [&] {
    std::nth_element(kept.begin(), kept.begin() + k - 1, kept.end());
    kept.resize(k);
    least = x[uint32_t(kept[k - 1])];
  };
  each_wide(n, [&](int64_t i, auto some) {
    Wide values = all<Wide>(kNothing);
    std::memcpy(&values, x + i, some * sizeof(float));
    if (!any(~(values <= all<Wide>(least)))) return;
    for (int64_t j = i; j < i + some; ++j) {
      if (x[j] <= least) continue;
      kept.push_back(place_of(x[j], j));
      if (int64_t(kept.size()) == 2 * k) halve();
    }
  });
  if (int64_t(kept.size()) > k) halve();
  std::sort(kept.begin(), kept.end());
  int32_t* end = columns;
  for (const uint64_t key : kept) *end++ = int32_t(uint32_t(key));
  for (int64_t i = 0; end < columns + k; ++i) {  // what is -inf, from the first on
    if (x[i] == kNothing) *end++ = int32_t(i);
  }
}

}  // namespace deepinfer

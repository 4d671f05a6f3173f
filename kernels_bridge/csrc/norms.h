// Norms and rotations of single rows.

#pragma once

#include <cmath>
#include <cstdint>

#include "elements.h"

namespace deepinfer {

template <class T>
inline float sum_of_squares(const T* x, int64_t k) {
  Lanes sum = {};
  for (int64_t i = 0; i < k; i += kLanes) {
    const Lanes value = i + kLanes <= k ? load(x + i) : load_tail(x + i, k - i);
    sum = madd(value, value, sum);
  }
  return total(sum);
}

// 1 / root mean square.
template <class T>
inline float normaliser(const T* x, int64_t k, float eps) {
  return 1 / std::sqrt(sum_of_squares(x, k) / float(k) + eps);
}

// weight * (x / root mean square).
template <class X, class W, class Y>
inline void norm_row(const X* x, const W* weight, int64_t k, float eps, Y* out) {
  const Wide scale = all<Wide>(normaliser(x, k, eps));
  each_wide(k, [&](int64_t i, auto some) {
    put(out + i, wide(weight + i, some) * (wide(x + i, some) * scale), some);
  });
}

// The last 2 `pairs` of k features turned by cos and sin, whose sign is `sign`; x is rounded to what is
// stored before it is turned.
template <class X, class Y>
inline void turn_row(const X* x, const float* cos, const float* sin, int64_t k, int64_t pairs,
                     float sign, Y* out) {
  const int64_t plain = k - 2 * pairs;
  each_wide(plain, [&](int64_t i, auto some) {
    put(out + i, wide(x + i, some), some);
  });
  const auto stored = [](float value) { return sizeof(Y) == 2 ? rounded(value) : value; };
  const auto write = [&](int64_t at, float value) {
    if constexpr (sizeof(Y) == 2) {
      out[at] = narrow(value);
    } else {
      out[at] = value;
    }
  };
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = stored(widen(x[plain + 2 * i])), b = stored(widen(x[plain + 2 * i + 1]));
    const float s = sign * sin[i];
    write(plain + 2 * i, a * cos[i] - b * s);
    write(plain + 2 * i + 1, a * s + b * cos[i]);
  }
}

}  // namespace deepinfer

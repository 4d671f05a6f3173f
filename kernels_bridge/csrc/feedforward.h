// Experts and their choice.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "elements.h"
#include "products.h"

namespace deepinfer {

// weight * silu(min(gate, limit)) * clip(up) of each row [n]; gate and up are what is stored of them as
// an X. No weights: 1. out may be either.
template <class X, class T, class Y>
inline void activate(const T* gates, const T* ups, int64_t stride, int64_t rows, int64_t n,
                     float limit, const float* weight, Y* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r, gates += stride, ups += stride, out += out_stride) {
    const Wide factor = all<Wide>(weight ? weight[r] : 1.0f), most = all<Wide>(limit);
    each_wide(n, [&](int64_t i, auto some) {
      const Wide gate = smaller(as_stored<X>(wide(gates + i, some)), most);
      const Wide up = larger(smaller(as_stored<X>(wide(ups + i, some)), most), -most);
      put(out + i, factor * (gate * sigmoid(gate) * up), some);
    });
  }
}

// Unpacked rows of k numbers as they are when stored as an X and read again.
template <class X>
inline void round_rows(float* x, int64_t rows, int64_t k) {
  for (int64_t r = 0; sizeof(X) == 2 && r < rows; ++r, x += padded(k)) {
    each_wide(k, [&](int64_t i, auto some) { put(x + i, rounded(wide(x + i, some)), some); });
  }
}

// One expert's gate and up [N, D] and down [D, N] on `rows` unpacked rows, in FP8 already where
// `quantized` -> y [rows, D], to be rounded as an X.
template <class X, class W>
void run_expert(const float* x, int64_t rows, const W* w1, const W* w3, const W* w2, int64_t d,
                int64_t n, float limit, const float* weight, bool quantized, float* y) {
  const int64_t width = padded(n);
  float* gate = scratch<2>(2 * rows * width);
  float *up = gate + rows * width, *hidden = gate;
  multiply(x, rows, w1, d, n, gate, width);
  multiply(x, rows, w3, d, n, up, width);
  activate<X>(gate, up, width, rows, n, limit, weight, hidden, width);
  for (int64_t r = 0; n < width && r < rows; ++r) {
    std::fill(hidden + r * width + n, hidden + (r + 1) * width, 0.0f);
  }
  round_rows<X>(hidden, rows, n);
  if (quantized) quantize_fp8(hidden, rows * n);
  multiply(hidden, rows, w2, n, d, y, d);
}

// The rows of each expert: places i of experts [T * k], in order, first[e] .. first[e + 1].
struct Shares {
  std::vector<int64_t> first, place;

  Shares(const int32_t* experts, int64_t pairs, int64_t count) : first(count + 1), place(pairs) {
    for (int64_t i = 0; i < pairs; ++i) {
      if (experts[i] >= 0 && experts[i] < count) ++first[experts[i] + 1];
    }
    for (int64_t e = 0; e < count; ++e) first[e + 1] += first[e];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < pairs; ++i) {
      if (experts[i] >= 0 && experts[i] < count) place[next[experts[i]]++] = i;
    }
  }
};

// sqrt(softplus(logit / temperature)) in the place of each.
inline void affinities(float* logits, int64_t count, float temperature) {
  each_wide(count, [&](int64_t i, auto some) {
    const Wide own = wide(logits + i, some) / all<Wide>(temperature);
    put(logits + i, root(softplus(own)), some);
  });
}

// The k experts with the largest score + bias, best first, of equal ones the lower, and their scores'
// share.
inline void choose_row(const float* scores, const float* bias, int64_t count, int64_t k,
                       float factor, bool normalised, int32_t* experts, float* weights) {
  const auto above = [](float a, float b) { return a > b || (a != a && b == b); };
  int64_t held = 0;
  for (int64_t e = 0; e < count; ++e) {
    const float own = scores[e] + bias[e];
    int64_t at = held;
    while (at > 0 && above(own, scores[experts[at - 1]] + bias[experts[at - 1]])) --at;
    if (at == k) continue;
    held = std::min(held + 1, k);
    for (int64_t i = held - 1; i > at; --i) experts[i] = experts[i - 1];
    experts[at] = int32_t(e);
  }
  float sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += scores[experts[i]];
  for (int64_t i = 0; i < k; ++i) {
    const float own = scores[experts[i]];
    weights[i] = (normalised ? own / (sum + 1e-20f) : own) * factor;
  }
}

}  // namespace deepinfer

// Operations of the model in float32 on bare pointers: an executor that has tensors of its own calls
// them (`kernels_bridge.direct`). Row-major, without gaps; the last arguments are the results.
//
// A function returns 0, or 1 where an index points outside of what it was given.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "attention.h"
#include "index.h"
#include "pages.h"
#include "products.h"

namespace deepinfer {
namespace {

// Memory that a thread keeps for its next call.
template <int Use>
float* scratch(int64_t count) {
  thread_local std::vector<float> kept;
  if (int64_t(kept.size()) < count) kept.resize(count);
  return kept.data();
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

float sum_of_squares(const float* x, int64_t k) {
  Lanes sum = {};
  const int64_t whole = k / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) sum = madd(load(x + i), load(x + i), sum);
  if (whole < k) {
    const Lanes last = load_tail(x + whole, k - whole);
    sum = madd(last, last, sum);
  }
  return total(sum);
}

// 1 / root mean square.
float normaliser(const float* x, int64_t k, float eps) {
  return 1 / std::sqrt(sum_of_squares(x, k) / float(k) + eps);
}

// x [rows, k] times w [columns, k] -> out [rows, columns].
void product(const float* x, int64_t rows, const float* w, int64_t k, int64_t columns, float* out) {
  if (padded(k) != k) {
    float* wide = scratch<0>(rows * padded(k));
    unpack(x, rows, k, k, wide);
    x = wide;
  }
  constexpr int64_t kHeight = 48, kStrip = 64;  // a strip of w stays near while rows pass
  for (int64_t n = 0; n < columns; n += kStrip) {
    for (int64_t r = 0; r < rows; r += kHeight) {
      multiply(x + r * padded(k), std::min(kHeight, rows - r), w + n * k, k,
               std::min(kStrip, columns - n), out + r * columns + n, columns);
    }
  }
}

// Rows [source, dest] of C x C numbers: softmax over dest, then alternate normalisations, ending over
// source. C is known where it is usual, else `streams`.
template <int C>
void normalise(float* m, int64_t streams, int64_t turns, float eps) {
  const int64_t c = C ? C : streams;
  const auto over_source = [&] {
    for (int64_t d = 0; d < c; ++d) {
      float sum = 0;
      for (int64_t s = 0; s < c; ++s) sum += m[s * c + d];
      sum += eps;
      for (int64_t s = 0; s < c; ++s) m[s * c + d] /= sum;
    }
  };
  const auto over_dest = [&](float more) {
    for (int64_t s = 0; s < c; ++s) {
      float sum = 0;
      for (int64_t d = 0; d < c; ++d) sum += m[s * c + d];
      sum += more;
      for (int64_t d = 0; d < c; ++d) m[s * c + d] /= sum;
    }
  };
  for (int64_t s = 0; s < c; ++s) {
    float* row = m + s * c;
    float top = *std::max_element(row, row + c);
    if (!std::isfinite(top)) top = 0;
    for (int64_t d = 0; d < c; ++d) row[d] = std::exp(row[d] - top);
  }
  over_dest(0);
  for (int64_t i = 0; i < c * c; ++i) m[i] += eps;
  over_source();
  for (int64_t turn = 1; turn < turns; ++turn) {
    over_dest(eps);
    over_source();
  }
}

// silu(min(gate, limit)) * clip(up) * weight of each column, in the place of gate: x [., 2n] holds gate
// and up.
void activate(const float* x, int64_t rows, int64_t n, float limit, const float* weight,
              float* out) {
  for (int64_t r = 0; r < rows; ++r, x += 2 * n, out += n) {
    const float factor = weight ? weight[r] : 1;
    for (int64_t i = 0; i < n; i += kLanes) {
      const int64_t some = std::min(kLanes, n - i);
      Lanes gate = some == kLanes ? load(x + i) : load_tail(x + i, some);
      Lanes up = some == kLanes ? load(x + n + i) : load_tail(x + n + i, some);
      for (int64_t j = 0; j < kLanes; ++j) {
        gate[j] = std::min(gate[j], limit);
        up[j] = std::max(std::min(up[j], limit), -limit);
      }
      const Words negative = gate < splat(0.0f);
      const Lanes size = (Lanes)((Words)gate & 0x7FFFFFFF);
      const Lanes e = exponential(-size);  // sigmoid is 1 / (1 + e) above 0, e / (1 + e) below
      const Lanes one = splat(1.0f);
      const Lanes above = (Lanes)((Words)one & ~negative), below = (Lanes)((Words)e & negative);
      const Lanes sigmoid = (above + below) / (one + e);
      const Lanes made = splat(factor) * (gate * sigmoid * up);
      std::memcpy(out + i, &made, some * sizeof(float));
    }
  }
}

// Whether a is before b: the larger value, NaN above all, then the lower index; -0 equals +0.
struct Better {
  const float* value;
  static bool above(float a, float b) { return a > b || (a != a && b == b); }
  bool operator()(int32_t a, int32_t b) const {
    return above(value[a], value[b]) || (!above(value[b], value[a]) && a < b);
  }
};

// Of `count` numbers ids(i), ascending in i, those of the k best scores above -inf: ascending, then -1.
template <class Ids>
void select_best(const float* score, int64_t count, int64_t k, const Ids& ids,
                 std::vector<int32_t>& order, int32_t* out) {
  order.clear();
  for (int64_t i = 0; i < count; ++i) {
    if (score[i] != -std::numeric_limits<float>::infinity()) order.push_back(int32_t(i));
  }
  if (k < int64_t(order.size())) {
    std::nth_element(order.begin(), order.begin() + k, order.end(), Better{score});
    order.resize(k);
  }
  int32_t* end = out;
  for (const int32_t i : order) {
    if (score[i] == score[i]) *end++ = ids(i);
  }
  std::sort(out, end);
  std::fill(end, out + k, -1);
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

extern "C" {

// raw [T, C(2 + C)], scale [3], base [C(2 + C)] -> pre, post [T, C], comb [T, C, C].
int direct_mixes(const float* raw, const float* scale, const float* base, float* pre, float* post,
                 float* comb, int64_t rows, int64_t c, int64_t turns, float eps) {
  for (int64_t r = 0; r < rows; ++r, raw += c * (2 + c), comb += c * c) {
    for (int64_t i = 0; i < c; ++i) {
      pre[r * c + i] = sigmoid(raw[i] * scale[0] + base[i]) + eps;
      post[r * c + i] = 2 * sigmoid(raw[c + i] * scale[1] + base[c + i]);
    }
    for (int64_t i = 0; i < c * c; ++i) comb[i] = raw[2 * c + i] * scale[2] + base[2 * c + i];
    c == 4 ? normalise<4>(comb, c, turns, eps) : normalise<0>(comb, c, turns, eps);
  }
  return 0;
}

// fn [N, K], streams [T, K] -> [T, N], of normalised streams.
int direct_raw_mixes(const float* fn, const float* streams, float* out, int64_t rows, int64_t k,
                     int64_t columns, float eps) {
  product(streams, rows, fn, k, columns, out);
  for (int64_t r = 0; r < rows; ++r, streams += k, out += columns) {
    const float scale = normaliser(streams, k, eps);
    for (int64_t n = 0; n < columns; ++n) out[n] *= scale;
  }
  return 0;
}

// x [T, K], weight [K] -> [T, K].
int direct_rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t k,
                    float eps) {
  for (int64_t r = 0; r < rows; ++r, x += k, out += k) {
    const float scale = normaliser(x, k, eps);
    for (int64_t i = 0; i < k; ++i) out[i] = weight[i] * (x[i] * scale);
  }
  return 0;
}

// weight [D], pre [T, C], streams [T, C, D] -> [T, D]: the streams weighted by pre, normalised.
int direct_normed(const float* weight, const float* pre, const float* streams, float* out,
                  int64_t rows, int64_t c, int64_t d, float eps) {
  for (int64_t r = 0; r < rows; ++r, pre += c, streams += c * d, out += d) {
    for (int64_t i = 0; i < d; ++i) out[i] = pre[0] * streams[i];
    for (int64_t s = 1; s < c; ++s) {
      for (int64_t i = 0; i < d; ++i) out[i] += pre[s] * streams[s * d + i];
    }
    const float scale = normaliser(out, d, eps);
    for (int64_t i = 0; i < d; ++i) out[i] = weight[i] * (out[i] * scale);
  }
  return 0;
}

// y [T, D], post [T, C], comb [T, C, C], streams [T, C, D] -> [T, C, D].
int direct_expand(const float* y, const float* post, const float* comb, const float* streams,
                  float* out, int64_t rows, int64_t c, int64_t d) {
  for (int64_t r = 0; r < rows; ++r, y += d, post += c, comb += c * c, streams += c * d) {
    for (int64_t to = 0; to < c; ++to, out += d) {
      for (int64_t i = 0; i < d; ++i) out[i] = comb[to] * streams[i];
      for (int64_t from = 1; from < c; ++from) {
        const float factor = comb[from * c + to];
        for (int64_t i = 0; i < d; ++i) out[i] += factor * streams[from * d + i];
      }
      for (int64_t i = 0; i < d; ++i) out[i] = post[to] * y[i] + out[i];
    }
  }
  return 0;
}

// x [T, H, K], cos and sin [T, R] of its last 2 R features -> [T, H, K]; sign -1 turns back.
int direct_rotated(const float* x, const float* cos, const float* sin, float* out, int64_t rows,
                   int64_t heads, int64_t k, int64_t pairs, float sign) {
  for (int64_t r = 0; r < rows; ++r, cos += pairs, sin += pairs) {
    for (int64_t h = 0; h < heads; ++h, x += k, out += k) {
      const int64_t plain = k - 2 * pairs;
      std::memcpy(out, x, plain * sizeof(float));
      for (int64_t i = 0; i < pairs; ++i) {
        const float a = x[plain + 2 * i], b = x[plain + 2 * i + 1], s = sign * sin[i];
        out[plain + 2 * i] = a * cos[i] - b * s;
        out[plain + 2 * i + 1] = a * s + b * cos[i];
      }
    }
  }
  return 0;
}

// x [T, D], weight [E, D], bias and other [E], of which rows where `choice` take the other -> experts
// and weights [T, k], best biased score first, scores [T, E].
int direct_route(const float* x, const float* weight, const float* bias, const float* other,
                 const uint8_t* choice, int32_t* experts, float* weights, float* scores, int64_t rows,
                 int64_t d, int64_t count, int64_t k, float temperature, float factor,
                 int64_t normalised) {
  product(x, rows, weight, d, count, scores);
  std::vector<float> biased(count);
  std::vector<int32_t> order(count);
  for (int64_t r = 0; r < rows; ++r, scores += count, experts += k, weights += k) {
    const float* more = choice[r] ? other : bias;
    for (int64_t e = 0; e < count; ++e) {
      const float logit = scores[e] / temperature;
      scores[e] = std::sqrt(std::max(logit, 0.0f) + std::log1p(std::exp(-std::abs(logit))));
      biased[e] = scores[e] + more[e];
    }
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + k, order.end(), Better{biased.data()});
    float sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += scores[order[i]];
    for (int64_t i = 0; i < k; ++i) {
      const float own = scores[order[i]];
      experts[i] = order[i];
      weights[i] = (normalised ? own / (sum + 1e-20f) : own) * factor;
    }
  }
  return 0;
}

// x [T, D], experts and weights [T, k], pairs [E, 2 N, D] of gate and up, down [E, D, N] -> [T, D]: of
// each row's experts in ascending order; an expert from E on gives nothing.
int direct_experts(const float* x, const int32_t* experts, const float* weights, const float* pairs,
                   const float* down, float* out, int64_t rows, int64_t k, int64_t count, int64_t n,
                   int64_t d, float limit) {
  std::vector<int64_t> given(count);
  for (int64_t i = 0; i < rows * k; ++i) {
    if (experts[i] >= 0 && experts[i] < count) ++given[experts[i]];
  }
  // Of one expert: more than there are rows where a row names it twice.
  const int64_t most = count ? *std::max_element(given.begin(), given.end()) : 0;
  float* own = scratch<1>(most * (d + 2 * n + n + d + 1));
  float *made = own + most * d, *hidden = made + most * 2 * n, *y = hidden + most * n;
  float* factor = y + most * d;
  std::vector<int64_t> taken(most);
  std::fill(out, out + rows * d, 0.0f);
  for (int64_t e = 0; e < count; ++e) {
    if (!given[e]) continue;
    int64_t some = 0;
    for (int64_t i = 0; i < rows * k; ++i) {
      if (experts[i] != e) continue;
      std::memcpy(own + some * d, x + i / k * d, d * sizeof(float));
      factor[some] = weights[i];
      taken[some++] = i / k;
    }
    product(own, some, pairs + e * 2 * n * d, d, 2 * n, made);
    activate(made, some, n, limit, factor, hidden);
    product(hidden, some, down + e * d * n, n, d, y);
    for (int64_t i = 0; i < some; ++i) {
      float* to = out + taken[i] * d;
      for (int64_t j = 0; j < d; ++j) to[j] += y[i * d + j];
    }
  }
  return 0;
}

// x [T, D], pairs [2 N, D], down [D, N] -> [T, D]: the expert of every row.
int direct_shared_expert(const float* x, const float* pairs, const float* down, float* out,
                         int64_t rows, int64_t n, int64_t d, float limit) {
  float* made = scratch<1>(rows * 3 * n);
  product(x, rows, pairs, d, 2 * n, made);
  activate(made, rows, n, limit, nullptr, made + rows * 2 * n);
  product(made + rows * 2 * n, rows, down, n, d, out);
  return 0;
}

// x [T, G, K] times w [G * N, K], group by group -> [T, G, N].
int direct_group_product(const float* x, const float* w, float* out, int64_t rows, int64_t groups,
                         int64_t k, int64_t columns) {
  float* wide = scratch<0>(rows * padded(k));
  for (int64_t g = 0; g < groups; ++g) {
    unpack(x + g * k, rows, groups * k, k, wide);
    multiply(wide, rows, w + g * columns * k, k, columns, out + g * columns, groups * columns);
  }
  return 0;
}

// Attention of rows over window and entries, as `Reach` reads them: q [T, H, K], fresh [T, K], ring
// [layers, B, R, K], entries [sources, P, size, K] in pages [B, G], first and start [B], slot (-1: as
// 0), position, floor [T], selected [T, S], sink [H] -> [T, H, K].
int direct_attend(const float* q, const float* fresh, const float* ring, const float* entries,
                  const int32_t* pages, const int32_t* first, const int32_t* start,
                  const int32_t* slot, const int32_t* position, const int32_t* floor,
                  const int32_t* selected, const float* sink, float* out, int64_t rows,
                  int64_t heads, int64_t width, int64_t layer, int64_t slots, int64_t turns,
                  int64_t source, int64_t sources, int64_t count, int64_t size, int64_t per_slot,
                  int64_t window, int64_t picked, float scale) {
  const Attention a{heads, width, window + picked, scale, false};
  const Reach<float, float> reach{
      fresh, rows, ring + layer * slots * turns * width, turns, first, start,
      {entries, pages, source, sources, count, size, width, per_slot}, window, picked, width};
  if (picked && !reach.entries.known()) return 1;
  float* memory = scratch<1>(a.scratch());
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t own = std::max(slot[r], 0);
    if (own >= slots) return 1;
    const int64_t seen =
        reach.collect(own, position[r], floor[r], selected + r * picked, memory + a.keys());
    attend_row(a, q + r * heads * width, seen, sink, memory, out + r * heads * width);
  }
  return 0;
}

// Writes fresh [T, K] to its places in the rings [layers, B, R, K] of a layer, the newest of a place
// last; slot [T], -1: not written, position [T].
int direct_store(float* rings, const float* fresh, const int32_t* slot, const int32_t* position,
                 int64_t rows, int64_t width, int64_t layers, int64_t slots, int64_t turns,
                 int64_t layer) {
  if (layer < 0 || layer >= layers) return 1;
  for (int64_t r = 0; r < rows; ++r) {
    if (slot[r] < 0 || slot[r] >= slots || position[r] < 0) continue;
    const int64_t place = (layer * slots + slot[r]) * turns + position[r] % turns;
    std::memcpy(rings + place * width, fresh + r * width, width * sizeof(float));
  }
  return 0;
}

// Scores of entries `ids` ([T, N], or [N] of all rows where `common`) in pages, as `direct_attend` has
// them: q [T, H, K], gain [T, H], slot, visible [T] -> [T, N]; -inf where an id is negative or not
// below `visible`.
int direct_scores(const float* q, const float* gain, const float* entries, const int32_t* pages,
                  const int32_t* slot, const int32_t* visible, const int32_t* ids, float* out,
                  int64_t rows, int64_t heads, int64_t width, int64_t n, int64_t common,
                  int64_t slots, int64_t source, int64_t sources, int64_t count, int64_t size,
                  int64_t per_slot) {
  const Pages<float> paged{entries, pages, source, sources, count, size, width, per_slot};
  if (!paged.known()) return 1;
  const int64_t wide = padded(width);
  float* queries = scratch<1>(heads * wide + n * (wide + heads + 1));
  float *keys = queries + heads * wide, *s = keys + n * wide, *score = s + n * heads;
  std::vector<int64_t> place(n);
  for (int64_t r = 0; r < rows; ++r, out += n) {
    const int64_t own = std::max(slot[r], 0);
    if (own >= slots) return 1;
    const int32_t* asked = common ? ids : ids + r * n;
    int64_t held = 0;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = -std::numeric_limits<float>::infinity();
      if (asked[i] < 0 || asked[i] >= visible[r]) continue;
      unpack(paged.at(own, asked[i]), 1, width, width, keys + held * wide);
      place[held++] = i;
    }
    unpack(q + r * heads * width, heads, width, width, queries);
    score_row(queries, gain + r * heads, heads, wide, keys, held, kNone, s, score);
    for (int64_t h = 0; h < held; ++h) out[place[h]] = score[h];
  }
  return 0;
}

// score [T, N], ids ([T, N], or [N] where `common`) ascending -> [T, k]: the ids of the best scores
// above -inf, ascending, then -1.
int direct_select(const float* score, const int32_t* ids, int32_t* out, int64_t rows, int64_t n,
                  int64_t k, int64_t common) {
  std::vector<int32_t> order;
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* own = common ? ids : ids + r * n;
    select_best(score + r * n, n, k, [own](int32_t i) { return own[i]; }, order, out + r * k);
  }
  return 0;
}

// score [T, N], visible [T] -> [T, k]: the blocks of `size` columns with the best members, ascending,
// then -1; the one of the newest visible column is always among them.
int direct_candidates(const float* score, const int32_t* visible, int32_t* out, int64_t rows,
                      int64_t n, int64_t size, int64_t k) {
  const int64_t blocks = (n + size - 1) / size;
  std::vector<float> best(blocks);
  std::vector<int32_t> order;
  for (int64_t r = 0; r < rows; ++r, score += n) {
    for (int64_t b = 0; b < blocks; ++b) {
      const float* first = score + b * size;
      best[b] = *std::min_element(first, first + std::min(size, n - b * size), Better::above);
    }
    const int64_t newest = visible[r] > 0 ? (visible[r] - 1) / size : blocks;
    if (newest < blocks) best[newest] = std::numeric_limits<float>::infinity();
    select_best(best.data(), blocks, k, [](int32_t i) { return i; }, order, out + r * k);
  }
  return 0;
}

// Rows of an Engram table: tokens [T, n], -1: `pad` [1]; multipliers [n] and primes and offsets
// [(n - 1) * heads] -> [T, (n - 1) * heads].
int direct_hashed(const int32_t* tokens, const int32_t* pad, const uint64_t* multipliers,
                  const uint64_t* primes, const int64_t* offsets, int32_t* out, int64_t rows,
                  int64_t n, int64_t heads) {
  for (int64_t r = 0; r < rows; ++r, tokens += n) {
    uint64_t mixed = 0;
    for (int64_t i = 0; i < n; ++i) {
      mixed ^= uint64_t(tokens[i] < 0 ? *pad : tokens[i]) * multipliers[i];
      if (!i) continue;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t column = (i - 1) * heads + h;
        *out++ = int32_t(mixed % primes[column]) + int32_t(offsets[column]);
      }
    }
  }
  return 0;
}

}  // extern "C"

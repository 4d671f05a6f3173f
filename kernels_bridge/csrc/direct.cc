// Operations of the model in float32 on bare pointers: an executor that has tensors of its own calls
// them (`kernels_bridge.direct`). Row-major, without gaps; the last arguments are the results.
//
// A function returns 0, or 1 where an index points outside of what it was given.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"
#include "feedforward.h"
#include "index.h"
#include "norms.h"
#include "pages.h"
#include "products.h"
#include "selection.h"
#include "streams.h"

namespace deepinfer {
namespace {

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

// Of `count` numbers ids(i), ascending in i, those of the k best scores above -inf: ascending, then -1.
template <class Ids>
void select_best(const float* score, int64_t count, int64_t k, const Ids& ids, int32_t* out) {
  std::vector<int32_t> columns(std::min(k, count));
  choose_best(score, count, columns.size(), columns.data());
  int32_t* end = out;
  for (const int32_t i : columns) {
    if (score[i] > -std::numeric_limits<float>::infinity()) *end++ = ids(i);
  }
  std::sort(out, end);
  std::fill(end, out + k, -1);
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

extern "C" {

// raw [T, C(2 + C)], scale [3], base [C(2 + C)] -> pre, post [T, C], comb [T, C, C]; C <= 8.
int direct_mixes(const float* raw, const float* scale, const float* base, float* pre, float* post,
                 float* comb, int64_t rows, int64_t c, int64_t turns, float eps) {
  if (c > kMostStreams) return 1;
  for (int64_t r = 0; r < rows; r += kWide) {
    mixes_of(raw + r * c * (2 + c), scale, base, pre + r * c, post + r * c, comb + r * c * c,
             std::min(kWide, rows - r), c, turns, eps);
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
  for (int64_t r = 0; r < rows; ++r) norm_row(x + r * k, weight, k, eps, out + r * k);
  return 0;
}

// weight [D], pre [T, C], streams [T, C, D] -> [T, D]: the streams weighted by pre, normalised.
int direct_normed(const float* weight, const float* pre, const float* streams, float* out,
                  int64_t rows, int64_t c, int64_t d, float eps) {
  float* memory = scratch<1>(d);
  for (int64_t r = 0; r < rows; ++r) {
    collapse_row(pre + r * c, streams + r * c * d, weight, c, d, eps, memory, out + r * d);
  }
  return 0;
}

// y [T, D], post [T, C], comb [T, C, C], streams [T, C, D] -> [T, C, D]; C <= 8.
int direct_expand(const float* y, const float* post, const float* comb, const float* streams,
                  float* out, int64_t rows, int64_t c, int64_t d) {
  if (c > kMostStreams) return 1;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = r * c * d;
    expand_row(y + r * d, post + r * c, comb + r * c * c, streams + at, c, d, out + at);
  }
  return 0;
}

// x [T, H, K], cos and sin [T, R] of its last 2 R features -> [T, H, K]; sign -1 turns back.
int direct_rotated(const float* x, const float* cos, const float* sin, float* out, int64_t rows,
                   int64_t heads, int64_t k, int64_t pairs, float sign) {
  for (int64_t i = 0; i < rows * heads; ++i) {
    const int64_t r = i / heads * pairs;
    turn_row(x + i * k, cos + r, sin + r, k, pairs, sign, out + i * k);
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
  affinities(scores, rows * count, temperature);
  for (int64_t r = 0; r < rows; ++r) {
    choose_row(scores + r * count, choice[r] ? other : bias, count, k, factor, normalised,
               experts + r * k, weights + r * k);
  }
  return 0;
}

// x [T, D], experts and weights [T, k], pairs [E, 2 N, D] of gate and up, down [E, D, N] -> [T, D]: of
// each row's experts in ascending order; an expert from E on gives nothing.
int direct_experts(const float* x, const int32_t* experts, const float* weights, const float* pairs,
                   const float* down, float* out, int64_t rows, int64_t k, int64_t count, int64_t n,
                   int64_t d, float limit) {
  const Shares shares(experts, rows * k, count);
  int64_t most = 0;
  for (int64_t e = 0; e < count; ++e) most = std::max(most, shares.first[e + 1] - shares.first[e]);
  const int64_t width = padded(d);
  float *own = scratch<1>(most * (width + d + 1)), *y = own + most * width, *factor = y + most * d;
  std::fill(out, out + rows * d, 0.0f);
  for (int64_t e = 0; e < count; ++e) {
    const int64_t* place = shares.place.data() + shares.first[e];
    const int64_t some = shares.first[e + 1] - shares.first[e];
    for (int64_t i = 0; i < some; ++i) {
      unpack(x + place[i] / k * d, 1, d, d, own + i * width);
      factor[i] = weights[place[i]];
    }
    const float* gate = pairs + e * 2 * n * d;
    run_expert<float>(own, some, gate, gate + n * d, down + e * d * n, d, n, limit, factor, false, y);
    for (int64_t i = 0; i < some; ++i) {
      float* to = out + place[i] / k * d;
      for (int64_t j = 0; j < d; ++j) to[j] += y[i * d + j];
    }
  }
  return 0;
}

// x [T, D], pairs [2 N, D], down [D, N] -> [T, D]: the expert of every row.
int direct_shared_expert(const float* x, const float* pairs, const float* down, float* out,
                         int64_t rows, int64_t n, int64_t d, float limit) {
  float* own = scratch<1>(rows * padded(d));
  unpack(x, rows, d, d, own);
  run_expert<float>(own, rows, pairs, pairs + n * d, down, d, n, limit, nullptr, false, out);
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
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* own = common ? ids : ids + r * n;
    select_best(score + r * n, n, k, [own](int32_t i) { return own[i]; }, out + r * k);
  }
  return 0;
}

// score [T, N], visible [T] -> [T, k]: the blocks of `size` columns with the best members, ascending,
// then -1; the one of the newest visible column is always among them.
int direct_candidates(const float* score, const int32_t* visible, int32_t* out, int64_t rows,
                      int64_t n, int64_t size, int64_t k) {
  const int64_t blocks = (n + size - 1) / size;
  std::vector<float> best(blocks);
  const auto above = [](float a, float b) { return a > b || (a != a && b == b); };  // NaN above all
  for (int64_t r = 0; r < rows; ++r, score += n) {
    for (int64_t b = 0; b < blocks; ++b) {
      const float* first = score + b * size;
      best[b] = *std::min_element(first, first + std::min(size, n - b * size), above);
    }
    const int64_t newest = visible[r] > 0 ? (visible[r] - 1) / size : blocks;
    if (newest < blocks) best[newest] = std::numeric_limits<float>::infinity();
    select_best(best.data(), blocks, k, [](int32_t i) { return i; }, out + r * k);
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

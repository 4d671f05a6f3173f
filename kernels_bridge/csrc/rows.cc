// Attention, index scores and selection for a CPU, as handlers of XLA's typed foreign function interface.
//
// What a row gives depends on that row's operands alone: every sum has an order fixed by its length,
// and neither the number of rows, nor blocking, nor threads enter it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "buffers.h"
#include "index.h"
#include "products.h"
#include "selection.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace deepinfer {
namespace {

// f(row, scratch) for every row, a few rows of a part.
template <class F>
void over_rows(ffi::ThreadPool pool, const Attention& a, int64_t rows, const F& f) {
  constexpr int64_t kAtOnce = 8;
  const int64_t parts = (rows + kAtOnce - 1) / kAtOnce;
  in_parts(pool, parts, 2 * rows * a.heads * a.width * a.slots, [&](int64_t part) {
    float* memory = scratch<1>(a.scratch());
    const int64_t end = std::min(rows, (part + 1) * kAtOnce);
    for (int64_t r = part * kAtOnce; r < end; ++r) f(r, memory);
  });
}

// q [..., H, K], keys [..., S, K], mask [..., S], sink [..., H] -> float32 [..., H, K].
ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys,
                  ffi::Buffer<ffi::PRED> mask, ffi::Buffer<ffi::F32> sink,
                  ffi::ResultBuffer<ffi::F32> out, float scale) {
  const auto shape = q.dimensions(), field = keys.dimensions();
  const size_t rank = shape.size();
  if (rank < 2 || field.size() != rank || field[rank - 1] != shape[rank - 1] ||
      keys.element_type() != q.element_type()) {
    return refuse("attend: q must be [..., H, K] and keys [..., S, K] of one type");
  }
  const Attention a{shape[rank - 2], shape[rank - 1], field[rank - 2], scale,
                    narrow_type(q.element_type())};
  const int64_t one = a.heads * a.width, rows = one ? int64_t(q.element_count()) / one : 0;
  if (!has(keys, rows * a.slots * a.width) || !has(mask, rows * a.slots) ||
      !has(sink, rows * a.heads)) {
    return refuse("attend: mask must be [..., S] and sink [..., H]");
  }
  const bool known = with_floats(q, [&](const auto* queries) {
    const auto* vectors = static_cast<decltype(queries)>(keys.untyped_data());
    over_rows(pool, a, rows, [&](int64_t r, float* scratch) {
      const auto* own = vectors + r * a.slots * a.width;
      int64_t seen = 0;  // keys that the mask leaves, in order
      for (int64_t s = 0; s < a.slots; ++s) {
        if (!mask.typed_data()[r * a.slots + s]) continue;
        unpack(own + s * a.width, 1, a.width, a.width,
               scratch + a.keys() + seen++ * padded(a.width));
      }
      attend_row(a, queries + r * one, seen, sink.typed_data() + r * a.heads, scratch,
                 out->typed_data() + r * one);
    });
  });
  return known ? ffi::Error::Success() : refuse("attend: operands must be bfloat16 or float32");
}

// Attention of rows over window and selected entries, read where the cache has them.
// q [T, H, K], fresh [F, K]: window vectors of all rows of the call, of which q may be some; ring
// [layers, B, R, K] as it was before it; entries, source, pages as in `Pages`; first, start [B]: first
// row and its position of each slot; slot, position, floor [T]; selected [T, S], -1: none; sink [H] ->
// float32 [T, H, K].
ffi::Error attend_cache(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer fresh,
                        ffi::AnyBuffer ring, ffi::Buffer<ffi::S32> layer, ffi::AnyBuffer entries,
                        ffi::Buffer<ffi::S32> source, ffi::Buffer<ffi::S32> pages,
                        ffi::Buffer<ffi::S32> first, ffi::Buffer<ffi::S32> start,
                        ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> position,
                        ffi::Buffer<ffi::S32> floor, ffi::Buffer<ffi::S32> selected,
                        ffi::Buffer<ffi::F32> sink, ffi::ResultBuffer<ffi::F32> out,
                        int64_t window, float scale) {
  const auto shape = q.dimensions(), rings = ring.dimensions();
  if (shape.size() != 3 || rings.size() != 4 || entries.dimensions().size() != 4 ||
      rings[3] != shape[2] || entries.dimensions()[3] != shape[2] ||
      fresh.element_type() != q.element_type() || entries.element_type() != ring.element_type()) {
    return refuse("attend_cache: q [T, H, K], fresh [T, K], ring and entries [., ., ., K]");
  }
  const int64_t count = shape[0];
  if (fresh.dimensions().size() != 2 || fresh.dimensions()[1] != shape[2] ||
      selected.dimensions().size() != 2 || selected.dimensions()[0] != count ||
      pages.dimensions().size() != 2 || !has(start, first.element_count())) {
    return refuse("attend_cache: fresh [F, K], selected [T, S], pages [B, G], first and start [B]");
  }
  if (!has(slot, count) || !has(position, count) || !has(floor, count) || !has(sink, shape[1])) {
    return refuse("attend_cache: slot, position, floor [T] and sink [H]");
  }
  const int64_t slots = std::min({rings[1], int64_t(first.element_count()), pages.dimensions()[0]});
  if (layer.typed_data()[0] < 0 || layer.typed_data()[0] >= rings[0] || !all_slots(slot, slots)) {
    return refuse("attend_cache: layer or slot out of range");
  }
  const int64_t picked = selected.dimensions()[1];
  const Attention a{shape[1], shape[2], window + picked, scale, narrow_type(q.element_type())};
  const int64_t one = a.heads * a.width, turns = rings[2];
  bool fits = false, inside = true;
  const bool known = with_floats(q, [&](const auto* queries) {
    const auto* vectors = static_cast<decltype(queries)>(fresh.untyped_data());
    fits = with_floats(ring, [&](const auto* old) {
      const auto* stored = static_cast<decltype(old)>(entries.untyped_data());
      const Reach<std::remove_const_t<std::remove_pointer_t<decltype(vectors)>>,
                  std::remove_const_t<std::remove_pointer_t<decltype(old)>>>
          reach{vectors, fresh.dimensions()[0], old + layer.typed_data()[0] * rings[1] * turns * a.width, turns,
                first.typed_data(), start.typed_data(), pages_of(entries, stored, source, pages),
                window, picked, a.width};
      inside = !picked || reach.entries.known();
      if (!inside) return;
      over_rows(pool, a, count, [&](int64_t r, float* scratch) {
        const int64_t seen = reach.collect(slot.typed_data()[r], position.typed_data()[r],
                                           floor.typed_data()[r],
                                           selected.typed_data() + r * picked, scratch + a.keys());
        attend_row(a, queries + r * one, seen, sink.typed_data(),
                   scratch, out->typed_data() + r * one);
      });
    });
  });
  if (!inside) return refuse("attend_cache: source out of range, or no pages");
  return known && fits ? ffi::Error::Success()
                       : refuse("attend_cache: operands must be bfloat16 or float32");
}

// Writes vectors [T, K] to their places [slot, place] of a layer's ring in `rings` [L, B, R, K], which
// the result takes over; a row without place there is not written. Runs after what made `before`.
ffi::Error store(ffi::AnyBuffer rings, ffi::Buffer<ffi::S32> layer, ffi::AnyBuffer vectors,
                 ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> place, ffi::AnyBuffer before,
                 ffi::Result<ffi::AnyBuffer> out) {
  const auto shape = rings.dimensions(), given = vectors.dimensions();
  if (shape.size() != 4 || given.size() != 2 || given[1] != shape[3] ||
      vectors.element_type() != rings.element_type() || !has(slot, given[0]) ||
      !has(place, given[0])) {
    return refuse("store: rings must be [L, B, R, K], vectors [T, K] of their type, places [T]");
  }
  const int64_t at = layer.typed_data()[0];
  if (at < 0 || at >= shape[0]) return refuse("store: layer out of range");
  char* to = static_cast<char*>(out->untyped_data());
  if (to != rings.untyped_data()) std::memcpy(to, rings.untyped_data(), rings.size_bytes());
  const int64_t one = given[0] ? vectors.size_bytes() / given[0] : 0;
  for (int64_t r = 0; r < given[0]; ++r) {
    const int64_t s = slot.typed_data()[r], p = place.typed_data()[r];
    if (s < 0 || s >= shape[1] || p < 0 || p >= shape[2]) continue;
    const char* from = static_cast<const char*>(vectors.untyped_data()) + r * one;
    std::memcpy(to + ((at * shape[1] + s) * shape[2] + p) * one, from, one);
  }
  return ffi::Error::Success();
}

// q [..., H, K], weight [..., H], keys [..., N, K] -> float32 [..., N]: sum over heads, ascending, of
// relu(q.k) * weight.
ffi::Error index_scores(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::Buffer<ffi::F32> weight,
                        ffi::AnyBuffer keys, ffi::ResultBuffer<ffi::F32> out, int64_t rounding) {
  const auto shape = q.dimensions(), field = keys.dimensions();
  const size_t rank = shape.size();
  if (rank < 2 || field.size() != rank || field[rank - 1] != shape[rank - 1]) {
    return refuse("index_scores: q must be [..., H, K] and keys [..., N, K]");
  }
  const int64_t heads = shape[rank - 2], k = shape[rank - 1], count = field[rank - 2];
  const int64_t one = heads * k, rows = one ? int64_t(q.element_count()) / one : 0;
  if (!has(weight, rows * heads) || !has(keys, rows * count * k)) {
    return refuse("index_scores: weight must be [..., H], of every row of q");
  }
  bool fits = false;
  const bool known = with_floats(q, [&](const auto* queries) {
    fits = with_floats(keys, [&](const auto* entries) {
      in_parts(pool, rows, rows * one * count, [&](int64_t r) {
        std::vector<float> wide(heads * padded(k)), s(heads * count);
        unpack(queries + r * one, heads, k, k, wide.data());
        score_row(wide.data(), weight.typed_data() + r * heads, heads, k, entries + r * count * k,
                  count, rounding, s.data(), out->typed_data() + r * count);
      });
    });
  });
  return known && fits ? ffi::Error::Success()
                       : refuse("index_scores: operands must be bfloat16 or float32");
}

constexpr int64_t kTogether = 12;  // rows whose scores are made together

// The entries `ids` [n] that some neighbouring rows of one slot see, each up to its own limit.
struct Seen {
  const int32_t* ids;
  int64_t n;
  bool ascending;
  const int32_t* visible;
  int64_t rows;

  bool by(int64_t row, int32_t id) const { return id >= 0 && id < visible[row]; }
  int64_t end() const {  // of what any of them sees
    const int32_t most = *std::max_element(visible, visible + rows);
    return ascending ? std::lower_bound(ids, ids + n, most) - ids : n;
  }
};

// Scores of those rows, a block of entries at a time, into out [rows, n].
template <class Q, class E>
void score_rows(const Q* q, const float* gain, int64_t heads, int64_t k, const Pages<E>& paged,
                int32_t slot, const Seen& seen, int64_t rounding, float* out) {
  constexpr int64_t kBlock = 256;
  const int64_t width = padded(k), count = seen.rows * heads;
  float* wide_q = scratch<1>(count * width + kBlock * (width + count));
  float *keys = wide_q + count * width, *s = keys + kBlock * width;
  float score[kBlock];
  int64_t place[kBlock], held = 0;
  unpack(q, count, k, k, wide_q);
  const int64_t end = seen.end();
  for (int64_t i = 0; i < end; ++i) {
    if (seen.ids[i] >= 0 && (seen.ascending || seen.by(0, seen.ids[i]))) {
      unpack(paged.at(slot, seen.ids[i]), 1, k, k, keys + held * width);
      place[held++] = i;
    }
    if (!held || (held < kBlock && i < end - 1)) continue;
    multiply(wide_q, count, keys, width, held, s, held);
    for (int64_t r = 0; r < seen.rows; ++r) {
      sum_heads(s + r * heads * held, gain + r * heads, heads, held, rounding, score);
      for (int64_t h = 0; h < held; ++h) {
        if (seen.by(r, seen.ids[place[h]])) out[r * seen.n + place[h]] = score[h];
      }
    }
    held = 0;
  }
}

// The same over entries `ids` of each row's slot, [T, N], or [N] of all rows and ascending, where the
// cache has them (see `Pages`); q [T, H, K], weight [T, H], slot, visible [T] -> float32 [T, N], -inf
// where an id is negative or not below `visible`.
ffi::Error index_cache(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::Buffer<ffi::F32> weight,
                       ffi::AnyBuffer entries, ffi::Buffer<ffi::S32> source,
                       ffi::Buffer<ffi::S32> pages, ffi::Buffer<ffi::S32> slot,
                       ffi::Buffer<ffi::S32> visible, ffi::Buffer<ffi::S32> ids,
                       ffi::ResultBuffer<ffi::F32> out, int64_t rounding) {
  const auto shape = q.dimensions(), field = entries.dimensions();
  if (shape.size() != 3 || field.size() != 4 || field[3] != shape[2]) {
    return refuse("index_cache: q must be [T, H, K] and entries [sources, P, size, K]");
  }
  const bool common = ids.dimensions().size() == 1;
  if ((ids.dimensions().size() != 2 && !common) || pages.dimensions().size() != 2 ||
      !all_slots(slot, pages.dimensions()[0])) {
    return refuse("index_cache: ids and pages have two axes, slots are those of the pages");
  }
  const int64_t rows = shape[0], heads = shape[1], k = shape[2], n = ids.dimensions().back();
  if (!has(weight, rows * heads) || !has(slot, rows) || !has(visible, rows) ||
      !(common || ids.dimensions()[0] == rows)) {
    return refuse("index_cache: weight must be [T, H], slot and visible [T]");
  }
  const int64_t parts = (rows + kTogether - 1) / kTogether;
  std::fill_n(out->typed_data(), rows * n, -std::numeric_limits<float>::infinity());
  bool fits = false, inside = true;
  const bool known = with_floats(q, [&](const auto* queries) {
    fits = with_floats(entries, [&](const auto* stored) {
      const auto paged = pages_of(entries, stored, source, pages);
      inside = paged.known();
      if (!inside) return;
      in_parts(pool, parts, rows * heads * k * std::min<int64_t>(n, 256), [&](int64_t part) {
        const int64_t end = std::min(rows, (part + 1) * kTogether);
        for (int64_t r = part * kTogether, next; r < end; r = next) {
          const int32_t of = slot.typed_data()[r];
          next = r + 1;  // rows of one slot see one list of keys, if all rows do
          while (common && next < end && slot.typed_data()[next] == of) ++next;
          const Seen seen{ids.typed_data() + (common ? 0 : r * n), n, common,
                          visible.typed_data() + r, next - r};
          score_rows(queries + r * heads * k, weight.typed_data() + r * heads, heads, k, paged, of,
                     seen, rounding, out->typed_data() + r * n);
        }
      });
    });
  });
  if (!inside) return refuse("index_cache: source out of range, or no pages");
  return known && fits ? ffi::Error::Success()
                       : refuse("index_cache: operands must be bfloat16 or float32");
}

// The k largest of x [T, n] in a total order, value and then lower column -> columns [T, k]; -0
// equals +0, NaN is the largest.
ffi::Error best(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::S32> columns) {
  if (x.dimensions().size() != 2) return refuse("best: x must be [T, n]");
  const int64_t rows = x.dimensions()[0], n = x.dimensions()[1], k = columns->dimensions()[1];
  if (k > n) return refuse("best: k must be at most n");
  in_parts(pool, rows, rows * n, [&](int64_t r) {
    choose_best(x.typed_data() + r * n, n, k, columns->typed_data() + r * k);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace deepinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_attend, deepinfer::attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("scale"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_attend_cache, deepinfer::attend_cache,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_store, deepinfer::store,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_index_cache, deepinfer::index_cache,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("rounding"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_best, deepinfer::best,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_index_scores, deepinfer::index_scores,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("rounding"));

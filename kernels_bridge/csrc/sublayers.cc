// Parts of a layer as single handlers of XLA's typed foreign function interface, for a CPU.
//
// What a row gives depends on that row's operands alone, as in `rows.cc`; roundings to the type of the
// activations stand where they stand in the model's functions.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "buffers.h"
#include "feedforward.h"
#include "norms.h"
#include "products.h"
#include "streams.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace deepinfer {
namespace {

using Layer = ffi::Buffer<ffi::S32>;

constexpr int64_t kHeight = 48;  // rows that pass through a part together

// A weight [N, K], or the one at `layer` of a stack [L, N, K]; `bad` where there is none.
struct Weight {
  ffi::AnyBuffer buffer;
  int64_t columns, k, at;
  bool bad;

  Weight(const ffi::AnyBuffer& w, const Layer& layer) : buffer(w) {
    const auto shape = w.dimensions();
    const bool stacked = shape.size() == 3;
    bad = shape.size() != 2 && !stacked;
    if (bad) return;
    columns = shape[stacked], k = shape[stacked + 1], at = stacked ? layer.typed_data()[0] : 0;
    bad = at < 0 || (stacked && at >= shape[0]);
  }

  template <class F>
  bool read(const F& f) const {
    return with_floats(buffer, [&](const auto* p) { f(p + at * columns * k); });
  }
};

// f(begin, end) for blocks of rows, `work` multiplications in all.
template <class F>
void over_blocks(ffi::ThreadPool pool, int64_t rows, int64_t height, int64_t work, const F& f) {
  in_parts(pool, (rows + height - 1) / height, work, [&](int64_t part) {
    f(part * height, std::min(rows, (part + 1) * height));
  });
}

template <class T>
using Plain = std::remove_const_t<std::remove_pointer_t<T>>;

// f(operand, result) of one type of activations.
template <class F>
bool with_rows(const ffi::AnyBuffer& x, ffi::Result<ffi::AnyBuffer>& y, const F& f) {
  if (narrow_type(x.element_type()) != narrow_type(y->element_type())) return false;
  return with_floats(x, [&](const auto* from) {
    f(from, static_cast<Plain<decltype(from)>*>(y->untyped_data()));
  });
}

// f(operand, result) of any types.
template <class F>
bool with_both(const ffi::AnyBuffer& x, ffi::Result<ffi::AnyBuffer>& y, const F& f) {
  return with_floats(x, [&](const auto* from) {
    if (narrow_type(y->element_type())) {
      f(from, static_cast<uint16_t*>(y->untyped_data()));
    } else {
      f(from, static_cast<float*>(y->untyped_data()));
    }
  });
}

// x [T, G, K] times w [G * N, K], group by group -> [T, G, N], rounded to the result's type; x in FP8
// first where `quantized`.
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, Layer layer,
                  ffi::Result<ffi::AnyBuffer> y, int64_t quantized) {
  const Weight weight(w, layer);
  const auto shape = x.dimensions();
  if (weight.bad || shape.size() != 3 || weight.k != shape[2] ||
      (quantized && shape[2] % kGroup)) {
    return refuse("product: x must be [T, G, K] and w [G * N, K] or [L, G * N, K] with its layer");
  }
  const int64_t rows = shape[0], groups = shape[1], k = shape[2], width = padded(k);
  const int64_t columns = groups ? weight.columns / groups : 0;
  if (rows * groups * columns == 0) return ffi::Error::Success();
  const bool floats = !narrow_type(y->element_type());
  // Where few rows leave threads nothing, they share columns.
  constexpr int64_t kStrip = 64;
  const int64_t strips = rows > 4 * kHeight ? 1 : (columns + kStrip - 1) / kStrip;
  const int64_t own = strips > 1 ? kStrip : columns, blocks = (rows + kHeight - 1) / kHeight;
  bool fits = false;
  const bool known = with_floats(x, [&](const auto* from) {
    fits = weight.read([&](const auto* p) {
      in_parts(pool, groups * strips * blocks, rows * groups * columns * k, [&](int64_t part) {
        const int64_t g = part / (strips * blocks), r = part / strips % blocks * kHeight;
        const int64_t n = part % strips * own, some = std::min(own, columns - n);
        const int64_t count = std::min(kHeight, rows - r);
        float* in = scratch<1>(count * (width + columns));
        float* out = in + count * width;
        unpack(from + (r * groups + g) * k, count, groups * k, k, in);
        if (quantized) quantize_fp8(in, count * k);
        if (floats) {
          multiply(in, count, p + (g * columns + n) * k, k, some,
                   static_cast<float*>(y->untyped_data()) + (r * groups + g) * columns + n,
                   groups * columns);
          return;
        }
        multiply(in, count, p + (g * columns + n) * k, k, some, out, some);
        uint16_t* to = static_cast<uint16_t*>(y->untyped_data()) + (r * groups + g) * columns + n;
        for (int64_t i = 0; i < count; ++i, to += groups * columns, out += some) {
          each_wide(some, [&](int64_t at, auto few) {
            put(to + at, wide(out + at, few), few);
          });
        }
      });
    });
  });
  return known && fits ? ffi::Error::Success() : refuse("product: bfloat16 or float32 expected");
}

// x [..., K], weight [K] -> [..., K].
ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                    ffi::Result<ffi::AnyBuffer> y, float eps) {
  const auto shape = x.dimensions();
  const int64_t k = weight.element_count();
  if (!k || shape.size() == 0 || shape.back() != k) {
    return refuse("rms_norm: x must be [..., K], weight [K]");
  }
  const int64_t rows = int64_t(x.element_count()) / k;
  bool fits = false;
  const bool known = with_both(x, y, [&](const auto* from, auto* to) {
    fits = with_floats(weight, [&](const auto* w) {
      over_blocks(pool, rows, kHeight, 4 * rows * k, [&](int64_t r, int64_t end) {
        for (; r < end; ++r) norm_row(from + r * k, w, k, eps, to + r * k);
      });
    });
  });
  return known && fits ? ffi::Error::Success() : refuse("rms_norm: bfloat16 or float32 expected");
}

// x [T, H, K], cos and sin [T, R] of its last 2 R features -> [T, H, K]; sign -1 turns back.
ffi::Error rotated(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> cos,
                   ffi::Buffer<ffi::F32> sin, ffi::Result<ffi::AnyBuffer> y, float sign) {
  const auto shape = x.dimensions(), angle = cos.dimensions();
  if (shape.size() != 3 || angle.size() != 2 || angle[0] != shape[0] || 2 * angle[1] > shape[2] ||
      !(sin.dimensions() == angle)) {
    return refuse("rotated: x must be [T, H, K], cos and sin [T, R]");
  }
  const int64_t rows = shape[0], heads = shape[1], k = shape[2], pairs = angle[1];
  const bool known = with_both(x, y, [&](const auto* from, auto* to) {
    over_blocks(pool, rows, kHeight, 4 * rows * heads * k, [&](int64_t r, int64_t end) {
      for (; r < end; ++r) {
        const float *c = cos.typed_data() + r * pairs, *s = sin.typed_data() + r * pairs;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = (r * heads + h) * k;
          turn_row(from + at, c, s, k, pairs, sign, to + at);
        }
      }
    });
  });
  return known ? ffi::Error::Success() : refuse("rotated: bfloat16 or float32 expected");
}

// streams [T, C, D], fn [C(2 + C), C * D], scale [3], base [C(2 + C)] -> pre, post [T, C], comb
// [T, C, C].
ffi::Error mix(ffi::ThreadPool pool, ffi::AnyBuffer streams, ffi::AnyBuffer fn, Layer layer,
               ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> base,
               ffi::ResultBuffer<ffi::F32> pre, ffi::ResultBuffer<ffi::F32> post,
               ffi::ResultBuffer<ffi::F32> comb, int64_t turns, float eps, float norm_eps) {
  const auto shape = streams.dimensions();
  const Weight weight(fn, layer);
  if (shape.size() != 3 || shape[1] > kMostStreams || weight.bad ||
      weight.k != shape[1] * shape[2] || weight.columns != shape[1] * (2 + shape[1]) ||
      !has(scale, 3) || !has(base, weight.columns)) {
    return refuse("mix: streams must be [T, C, D] and fn [C(2 + C), C * D], of at most 8 streams");
  }
  const int64_t rows = shape[0], c = shape[1], k = weight.k, width = padded(k), n = weight.columns;
  bool fits = false;
  const bool known = with_floats(streams, [&](const auto* from) {
    fits = weight.read([&](const auto* p) {
      over_blocks(pool, rows, kHeight, rows * k * n, [&](int64_t r, int64_t end) {
        const int64_t count = end - r;
        float *in = scratch<1>(count * (width + n)), *raw = in + count * width;
        unpack(from + r * k, count, k, k, in);
        multiply(in, count, p, k, n, raw, n);
        for (int64_t i = 0; i < count; ++i) {
          const float by = normaliser(in + i * width, k, norm_eps);
          for (int64_t j = 0; j < n; ++j) raw[i * n + j] *= by;
        }
        for (; r < end; r += kWide, raw += kWide * n) {
          mixes_of(raw, scale.typed_data(), base.typed_data(), pre->typed_data() + r * c,
                   post->typed_data() + r * c, comb->typed_data() + r * c * c,
                   std::min(kWide, end - r), c, turns, eps);
        }
      });
    });
  });
  return known && fits ? ffi::Error::Success() : refuse("mix: bfloat16 or float32 expected");
}

// weight [D], pre [T, C], streams [T, C, D] -> [T, D]: the streams weighted by pre, normalised.
ffi::Error normed(ffi::ThreadPool pool, ffi::AnyBuffer weight, ffi::Buffer<ffi::F32> pre,
                  ffi::AnyBuffer streams, ffi::Result<ffi::AnyBuffer> y, float eps) {
  const auto shape = streams.dimensions();
  if (shape.size() != 3 || !has(weight, shape[2]) || !has(pre, shape[0] * shape[1])) {
    return refuse("normed: streams must be [T, C, D], weight [D], pre [T, C]");
  }
  const int64_t rows = shape[0], c = shape[1], d = shape[2];
  bool fits = false;
  const bool known = with_rows(streams, y, [&](const auto* from, auto* to) {
    fits = with_floats(weight, [&](const auto* w) {
      over_blocks(pool, rows, kHeight, 2 * rows * c * d, [&](int64_t r, int64_t end) {
        float* memory = scratch<1>(d);
        for (; r < end; ++r) {
          collapse_row(pre.typed_data() + r * c, from + r * c * d, w, c, d, eps, memory, to + r * d);
        }
      });
    });
  });
  return known && fits ? ffi::Error::Success() : refuse("normed: one type of activations expected");
}

// y [T, D], post [T, C], comb [T, C, C], streams [T, C, D] -> [T, C, D].
ffi::Error expand(ffi::ThreadPool pool, ffi::AnyBuffer y, ffi::Buffer<ffi::F32> post,
                  ffi::Buffer<ffi::F32> comb, ffi::AnyBuffer streams,
                  ffi::Result<ffi::AnyBuffer> out) {
  const auto shape = streams.dimensions();
  if (shape.size() != 3 || shape[1] > kMostStreams || y.element_type() != streams.element_type()) {
    return refuse("expand: streams must be [T, C, D] and y [T, D] of one type");
  }
  const int64_t rows = shape[0], c = shape[1], d = shape[2];
  if (!has(y, rows * d) || !has(post, rows * c) || !has(comb, rows * c * c)) {
    return refuse("expand: y must be [T, D], post [T, C], comb [T, C, C]");
  }
  const bool known = with_rows(streams, out, [&](const auto* from, auto* to) {
    const auto* own = static_cast<decltype(from)>(y.untyped_data());
    over_blocks(pool, rows, kHeight, 2 * rows * c * c * d, [&](int64_t r, int64_t end) {
      for (; r < end; ++r) {
        expand_row(own + r * d, post.typed_data() + r * c, comb.typed_data() + r * c * c,
                   from + r * c * d, c, d, to + r * c * d);
      }
    });
  });
  return known ? ffi::Error::Success() : refuse("expand: one type of activations expected");
}

// x [T, D], weight [E, D], bias and other [E], of which rows where `choice` [T] take the other ->
// experts and weights [T, k], best biased score first, scores [T, E].
ffi::Error route(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, Layer layer,
                 ffi::Buffer<ffi::F32> bias, ffi::Buffer<ffi::F32> other,
                 ffi::Buffer<ffi::PRED> choice, ffi::ResultBuffer<ffi::S32> experts,
                 ffi::ResultBuffer<ffi::F32> weights, ffi::ResultBuffer<ffi::F32> scores,
                 float temperature, float factor, int64_t normalised) {
  const Weight weight(w, layer);
  const auto shape = x.dimensions();
  if (weight.bad || shape.size() != 2 || shape[1] != weight.k) {
    return refuse("route: x must be [T, D] and weight [E, D]");
  }
  const int64_t rows = shape[0], d = shape[1], count = weight.columns;
  const int64_t k = experts->dimensions()[1], width = padded(d);
  if (k > count) return refuse("route: more experts asked for than there are");
  if (!has(bias, count) || !has(other, count) || !has(choice, rows)) {
    return refuse("route: bias and other must be [E], choice [T]");
  }
  bool fits = false;
  const bool known = with_floats(x, [&](const auto* from) {
    fits = weight.read([&](const auto* p) {
      over_blocks(pool, rows, kHeight, rows * d * count, [&](int64_t r, int64_t end) {
        float* in = scratch<1>((end - r) * width);
        float* to = scores->typed_data() + r * count;
        unpack(from + r * d, end - r, d, d, in);
        multiply(in, end - r, p, d, count, to, count);
        affinities(to, (end - r) * count, temperature);
        for (; r < end; ++r, to += count) {
          choose_row(to, (choice.typed_data()[r] ? other : bias).typed_data(), count, k, factor,
                     normalised, experts->typed_data() + r * k, weights->typed_data() + r * k);
        }
      });
    });
  });
  return known && fits ? ffi::Error::Success() : refuse("route: bfloat16 or float32 expected");
}

// x [T, D], experts and weights [T, k], stacks w1, w3 [L, E, N, D] and w2 [L, E, D, N] at layer ->
// [T, k, D]: what each row's experts give, zeros of an expert that is none of E.
ffi::Error experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> chosen,
                   ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer w1, ffi::AnyBuffer w3,
                   ffi::AnyBuffer w2, Layer layer, ffi::Result<ffi::AnyBuffer> out, float limit,
                   int64_t quantized) {
  const auto in = x.dimensions(), up = w1.dimensions(), down = w2.dimensions();
  const bool shaped = in.size() == 2 && up.size() == 4 && down.size() == 4 && up[3] == in[1] &&
                      down[2] == in[1] && down[3] == up[2] && down[1] == up[1] &&
                      w3.dimensions() == up && w1.element_type() == w2.element_type() &&
                      w1.element_type() == w3.element_type() && chosen.dimensions().size() == 2 &&
                      chosen.dimensions()[0] == in[0] && weights.dimensions() == chosen.dimensions();
  if (!shaped || (quantized && (in[1] % kGroup || up[2] % kGroup))) {
    return refuse("experts: x [T, D], w1 and w3 [L, E, N, D], w2 [L, E, D, N] of one type expected");
  }
  const int64_t at = layer.typed_data()[0], d = in[1], n = up[2], count = up[1];
  const int64_t k = chosen.dimensions()[1], width = padded(d), pairs = in[0] * k;
  if (at < 0 || at >= up[0]) return refuse("experts: layer out of range");
  const Shares shares(chosen.typed_data(), pairs, count);
  std::vector<std::pair<int64_t, int64_t>> parts;  // expert, first of its places
  for (int64_t e = 0; e < count; ++e) {
    for (int64_t i = shares.first[e]; i < shares.first[e + 1]; i += kHeight) parts.push_back({e, i});
  }
  float* wide_x = scratch<3>(in[0] * width);  // made once, not for every expert
  bool fits = false;
  const bool known = with_rows(x, out, [&](const auto* from, auto* to) {
    using X = Plain<decltype(from)>;
    for (int64_t i = 0; i < pairs; ++i) {
      const int32_t e = chosen.typed_data()[i];
      if (e < 0 || e >= count) std::fill_n(to + i * d, d, X{});
    }
    over_blocks(pool, in[0], kHeight, 16 * in[0] * d, [&](int64_t r, int64_t end) {
      float* own = wide_x + r * width;
      unpack(from + r * d, end - r, d, d, own);
      if (quantized) quantize_fp8(own, (end - r) * d);
    });
    fits = with_floats(w1, [&](const auto* gate) {
      using W = Plain<decltype(gate)>;
      in_parts(pool, parts.size(), shares.first[count] * 3 * n * d, [&](int64_t part) {
        const auto [e, begin] = parts[part];
        const int64_t some = std::min(kHeight, shares.first[e + 1] - begin);
        float *own = scratch<1>(some * (width + d + 1)), *y = own + some * width;
        float* weight = y + some * d;
        for (int64_t i = 0; i < some; ++i) {
          const int64_t place = shares.place[begin + i];
          std::copy_n(wide_x + place / k * width, width, own + i * width);
          weight[i] = weights.typed_data()[place];
        }
        const int64_t one = n * d, skip = (at * count + e) * one;
        run_expert<X>(own, some, gate + skip, data<W>(w3) + skip, data<W>(w2) + skip, d, n, limit,
                      weight, quantized, y);
        for (int64_t i = 0; i < some; ++i) {
          X* own_place = to + shares.place[begin + i] * d;
          each_wide(d, [&](int64_t j, auto few) {
            put(own_place + j, wide(y + i * d + j, few), few);
          });
        }
      });
    });
  });
  return known && fits ? ffi::Error::Success() : refuse("experts: bfloat16 or float32 expected");
}

// gate, up [M, N] -> float32 [M, N], what an expert multiplies `down` with before its weight.
ffi::Error activate_rows(ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::ResultBuffer<ffi::F32> y,
                         float limit) {
  const int64_t count = gate.element_count();
  if (up.element_type() != gate.element_type() || int64_t(up.element_count()) != count) {
    return refuse("activate: gate and up must be alike");
  }
  const bool known = with_floats(gate, [&](const auto* from) {
    const auto* other = static_cast<decltype(from)>(up.untyped_data());
    activate<float>(from, other, 0, 1, count, limit, nullptr, y->typed_data(), 0);
  });
  return known ? ffi::Error::Success() : refuse("activate: bfloat16 or float32 expected");
}

// x [T, D], w1 and w3 [N, D], w2 [D, N] -> [T, D]: the expert of every row.
ffi::Error shared(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w1, ffi::AnyBuffer w3,
                  ffi::AnyBuffer w2, Layer layer, ffi::Result<ffi::AnyBuffer> y, float limit,
                  int64_t quantized) {
  const Weight gate(w1, layer), up(w3, layer), down(w2, layer);
  const auto shape = x.dimensions();
  if (gate.bad || up.bad || down.bad || shape.size() != 2 || gate.k != shape[1] ||
      up.k != shape[1] || up.columns != gate.columns || down.columns != shape[1] ||
      down.k != gate.columns || w1.element_type() != w2.element_type() ||
      w1.element_type() != w3.element_type() ||
      (quantized && (gate.k % kGroup || down.k % kGroup))) {
    return refuse("shared: x [T, D], w1 and w3 [N, D], w2 [D, N] of one type expected");
  }
  const int64_t rows = shape[0], d = shape[1], n = gate.columns, width = padded(d);
  bool fits = false;
  const bool known = with_rows(x, y, [&](const auto* from, auto* to) {
    using X = Plain<decltype(from)>;
    fits = gate.read([&](const auto* p) {
      using W = Plain<decltype(p)>;
      over_blocks(pool, rows, kHeight, rows * 3 * n * d, [&](int64_t r, int64_t end) {
        const int64_t some = end - r;
        float *own = scratch<1>(some * (width + d)), *made = own + some * width;
        unpack(from + r * d, some, d, d, own);
        if (quantized) quantize_fp8(own, some * d);
        run_expert<X>(own, some, p, data<W>(w3) + up.at * n * d, data<W>(w2) + down.at * n * d, d, n,
                      limit, nullptr, quantized, made);
        each_wide(some * d, [&](int64_t i, auto few) {
          put(to + r * d + i, wide(made + i, few), few);
        });
      });
    });
  });
  return known && fits ? ffi::Error::Success() : refuse("shared: one type of activations expected");
}

using xla::ffi::AnyBuffer;
using xla::ffi::Ffi;
using F32 = xla::ffi::Buffer<xla::ffi::F32>;
using S32 = xla::ffi::Buffer<xla::ffi::S32>;

}  // namespace
}  // namespace deepinfer

#define DEEPINFER_HANDLER(name, binding) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_##name, deepinfer::name, binding)

using namespace deepinfer;

DEEPINFER_HANDLER(product, Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                              .Arg<S32>().Ret<AnyBuffer>().Attr<int64_t>("quantized"));
DEEPINFER_HANDLER(rms_norm, Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                                .Ret<AnyBuffer>().Attr<float>("eps"));
DEEPINFER_HANDLER(rotated, Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<F32>()
                               .Arg<F32>().Ret<AnyBuffer>().Attr<float>("sign"));
DEEPINFER_HANDLER(mix, Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                           .Arg<S32>().Arg<F32>().Arg<F32>().Ret<F32>().Ret<F32>().Ret<F32>()
                           .Attr<int64_t>("turns").Attr<float>("eps").Attr<float>("norm_eps"));
DEEPINFER_HANDLER(normed, Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<F32>()
                              .Arg<AnyBuffer>().Ret<AnyBuffer>().Attr<float>("eps"));
DEEPINFER_HANDLER(expand, Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<F32>().Arg<F32>()
                              .Arg<AnyBuffer>().Ret<AnyBuffer>());
DEEPINFER_HANDLER(route, Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                             .Arg<S32>().Arg<F32>().Arg<F32>().Arg<ffi::Buffer<ffi::PRED>>()
                             .Ret<S32>().Ret<F32>().Ret<F32>().Attr<float>("temperature")
                             .Attr<float>("factor").Attr<int64_t>("normalised"));
DEEPINFER_HANDLER(experts, Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<S32>().Arg<F32>()
                               .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<S32>()
                               .Ret<AnyBuffer>().Attr<float>("limit").Attr<int64_t>("quantized"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_activate, deepinfer::activate_rows,
                              Ffi::Bind().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<F32>()
                                  .Attr<float>("limit"));
DEEPINFER_HANDLER(shared, Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                              .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<S32>().Ret<AnyBuffer>()
                              .Attr<float>("limit").Attr<int64_t>("quantized"));

// Products of rows with weights in FP4 and FP8 on an NVIDIA GPU, as handlers of XLA's typed foreign
// function interface. What a row gives depends on that row's operands alone (few.cuh).

#include <algorithm>
#include <cstdint>

#include "few.cuh"
#include "many.cuh"
#include "operands.cuh"
#include "xla/ffi/api/ffi.h"

namespace deepinfer {
namespace {

namespace ffi = xla::ffi;

ffi::Error refuse(const char* what) { return ffi::Error::InvalidArgument(what); }

ffi::Error failed(cudaError_t error) {
  return error == cudaSuccess ? ffi::Error::Success()
                              : ffi::Error::Internal(cudaGetErrorString(error));
}

// A kernel may use `bytes` of shared memory; `share` of a multiprocessor's is shared memory at all,
// in percent, and the rest caches rows.
template <class Kernel>
cudaError_t prepare(Kernel kernel, int bytes, int share) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, share);
}

template <class F>
cudaError_t launch_few(cudaStream_t stream, const Operands& given, dim3 grid) {
  const int warps = F::kWarps / given.parts * given.parts, bytes = warps * F::kBytes;
  const auto kernel = few_rows<F>;
  if (const cudaError_t error = prepare(kernel, bytes, 72)) return error;
  const int outputs = warps / given.parts * F::kOutputs;
  grid.x = (given.n + outputs - 1) / outputs;
  kernel<<<grid, 32 * warps, bytes, stream>>>(given);
  return cudaGetLastError();
}

template <class F>
cudaError_t launch_many(cudaStream_t stream, const Operands& given, dim3 grid) {
  const auto kernel = many_rows<F>;
  if (const cudaError_t error = prepare(kernel, F::kBytes, 100)) return error;
  const int outputs = F::WARPS * F::kOutputs;
  grid.x = (given.n + outputs - 1) / outputs;
  kernel<<<grid, F::kThreads, F::kBytes, stream>>>(given);
  return cudaGetLastError();
}

// Rows of a tile: of one row or a few, and of many.
constexpr int kFew = 8, kSome = 16, kMany = 64;

bool is_height(int64_t rows) { return rows == kFew || rows == kSome || rows == kMany; }

template <int BITS, int MT, int STAGES>
cudaError_t launch(cudaStream_t stream, const Operands& given, dim3 grid) {
  switch (given.tile_rows) {
    case kFew: return launch_few<Few<BITS, MT, 1, STAGES, 3>>(stream, given, grid);
    case kSome: return launch_few<Few<BITS, MT, 2, STAGES, 2>>(stream, given, grid);
    default:
      if (given.expert) return launch_many<Many<BITS, 2, 8, 4, 3, false>>(stream, given, grid);
      grid.z *= given.parts;
      return launch_many<Many<BITS, 2, 8, 4, 3, true>>(stream, given, grid);
  }
}

// What all handlers check and fill in; weight codes [layers, E * N, K or K / 2] in any split of axes.
const char* describe(Operands& given, const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scale,
                     int64_t k, int64_t n, int64_t weights, int& bits) {
  const int64_t width = codes.dimensions().back();
  if (width != k && width * 2 != k) return "codes must be [..., N, K] or [..., N, K / 2]";
  if (k % 128 || k == 0) return "K must be a multiple of 128";
  bits = width == k ? 8 : 4;
  if (codes.element_type() != ffi::U8 || scale.element_type() != ffi::U8) {
    return "codes and scales must be uint8";
  }
  const auto held = scale.dimensions();
  if (held.size() < 2 || held.back() * 32 != k) return "scales must be [..., K / 32]";
  given.n = n;
  given.blocks = k / 128;
  given.signs = kSigns;
  given.weights = weights;
  given.scale_rows = held[held.size() - 2];
  given.by_block = false;
  return nullptr;
}

ffi::Error run(cudaStream_t stream, Operands given, dim3 grid, int bits, int64_t parts,
               ffi::DataType out) {
  if (given.n == 0 || grid.y == 0) return ffi::Error::Success();
  if (!is_height(given.tile_rows)) return refuse("tiles have 8, 16 or 64 rows");
  if (parts < 1 || parts > 8 || given.blocks % parts) return refuse("K has no such parts");
  if (given.n % 32) return refuse("N must be a multiple of 32");
  if (out != ffi::BF16 && out != ffi::F32) return refuse("the result must be bfloat16 or float32");
  given.parts = parts;
  given.wide = out == ffi::F32;
  return failed(bits == 4 ? launch<4, 2, 3>(stream, given, grid)
                          : launch<8, 1, 4>(stream, given, grid));
}

// x [M, G, K] times codes [layers, G * N, ...] at layer -> [1, M, G, N], with bias [G * N] or [0];
// in tiles of 64 rows the parts of K -> float32 [parts, M, G, N].
ffi::Error product(cudaStream_t stream, ffi::Buffer<ffi::BF16> x, ffi::AnyBuffer codes,
                   ffi::AnyBuffer scale, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::F32> bias,
                   ffi::Result<ffi::AnyBuffer> y, int64_t parts, int64_t rows) {
  const auto in = x.dimensions(), out = y->dimensions(), held = codes.dimensions();
  if (in.size() != 3 || out.size() != 4 || held.size() != 3 || held[1] != in[1] * out[3] ||
      out[0] != (rows == kMany ? parts : 1) || out[1] != in[0] || out[2] != in[1]) {
    return refuse("product: x must be [M, G, K], codes [layers, G * N, ...], y [parts, M, G, N]");
  }
  if (rows == kMany && y->element_type() != ffi::F32) {
    return refuse("product: parts of K must be float32");
  }
  if (!is_height(rows)) return refuse("product: tiles have 8, 16 or 64 rows");
  Operands given{};
  int bits = 0;
  if (const char* wrong = describe(given, codes, scale, in[2], out[3], in[1], bits)) {
    return refuse(wrong);
  }
  given.by_block = given.scale_rows != held[1];
  if (given.by_block && given.scale_rows != (held[1] + 31) / 32) {
    return refuse("product: scales must be for each row or for each 32");
  }
  given.weight[0] = {static_cast<const uint8_t*>(codes.untyped_data()),
                     static_cast<const uint8_t*>(scale.untyped_data()), y->untyped_data()};
  given.x = reinterpret_cast<const uint4*>(x.untyped_data());
  given.layer = layer.typed_data();
  given.bias = bias.element_count() ? bias.typed_data() : nullptr;
  given.m = in[0];
  given.groups = in[1];
  given.tile_rows = rows;
  const dim3 grid(1, (in[0] + rows - 1) / rows, in[1]);
  return run(stream, given, grid, bits, parts, y->element_type());
}

// Fills in what products of experts share; x [tiles * rows, K], codes [layers, E, N, ...].
const char* of_experts(Operands& given, const ffi::Buffer<ffi::BF16>& x,
                       const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scale,
                       const ffi::Buffer<ffi::S32>& layer, const ffi::Buffer<ffi::S32>& expert,
                       const ffi::Buffer<ffi::S32>& live, const ffi::Buffer<ffi::S32>& used,
                       int& bits) {
  const auto in = x.dimensions(), held = codes.dimensions();
  const int64_t tiles = expert.element_count();
  if (in.size() != 2 || held.size() != 4 || tiles == 0 || in[0] % tiles ||
      live.element_count() != tiles) {
    return "experts: x must be [tiles * rows, K], codes [layers, E, N, ...], live [tiles]";
  }
  if (const char* wrong = describe(given, codes, scale, in[1], held[2], held[1], bits)) return wrong;
  given.by_block = given.scale_rows != held[2];
  if (given.by_block && given.scale_rows != (held[2] + 31) / 32) {
    return "experts: scales must be for each row or for each 32";
  }
  given.x = reinterpret_cast<const uint4*>(x.untyped_data());
  given.layer = layer.typed_data();
  given.expert = expert.typed_data();
  given.live = live.typed_data();
  given.used = used.typed_data();
  given.m = in[0];
  given.groups = 1;
  given.tile_rows = in[0] / tiles;
  return nullptr;
}

bool same(ffi::Span<const int64_t> a, ffi::Span<const int64_t> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

ffi::Error experts(cudaStream_t stream, ffi::Buffer<ffi::BF16> x, ffi::AnyBuffer codes,
                   ffi::AnyBuffer scale, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> expert,
                   ffi::Buffer<ffi::S32> live, ffi::Buffer<ffi::S32> used,
                   ffi::Result<ffi::AnyBuffer> y, int64_t parts) {
  Operands given{};
  int bits = 0;
  if (const char* wrong = of_experts(given, x, codes, scale, layer, expert, live, used, bits)) {
    return refuse(wrong);
  }
  given.weight[0] = {static_cast<const uint8_t*>(codes.untyped_data()),
                     static_cast<const uint8_t*>(scale.untyped_data()), y->untyped_data()};
  return run(stream, given, dim3(1, expert.element_count(), 1), bits, parts, y->element_type());
}

// Two weights of one shape with the same rows.
ffi::Error experts_twice(cudaStream_t stream, ffi::Buffer<ffi::BF16> x, ffi::AnyBuffer codes,
                         ffi::AnyBuffer scale, ffi::AnyBuffer other_codes,
                         ffi::AnyBuffer other_scale, ffi::Buffer<ffi::S32> layer,
                         ffi::Buffer<ffi::S32> expert, ffi::Buffer<ffi::S32> live,
                         ffi::Buffer<ffi::S32> used, ffi::Result<ffi::AnyBuffer> y,
                         ffi::Result<ffi::AnyBuffer> z, int64_t parts) {
  if (!same(codes.dimensions(), other_codes.dimensions()) ||
      !same(scale.dimensions(), other_scale.dimensions()) ||
      y->element_type() != z->element_type()) {
    return refuse("experts: both weights must have one shape");
  }
  Operands given{};
  int bits = 0;
  if (const char* wrong = of_experts(given, x, codes, scale, layer, expert, live, used, bits)) {
    return refuse(wrong);
  }
  given.weight[0] = {static_cast<const uint8_t*>(codes.untyped_data()),
                     static_cast<const uint8_t*>(scale.untyped_data()), y->untyped_data()};
  given.weight[1] = {static_cast<const uint8_t*>(other_codes.untyped_data()),
                     static_cast<const uint8_t*>(other_scale.untyped_data()), z->untyped_data()};
  return run(stream, given, dim3(1, expert.element_count(), 2), bits, parts, y->element_type());
}

}  // namespace
}  // namespace deepinfer

namespace deepinfer {

XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_cuda_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("parts")
                                  .Attr<int64_t>("rows"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_cuda_experts, experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("parts"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_cuda_experts_twice, experts_twice,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("parts"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace deepinfer

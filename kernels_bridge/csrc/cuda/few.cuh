// Products of a few rows with stored weights: a warp reads its weights once, for up to 16 rows.
//
// The order of a sum. K is cut into blocks of 128 and the blocks into `parts` equal runs, whose sums
// are added one after the other. A block takes eight steps of 16 terms, one instruction each: four
// terms of each thread of a quad, which hold K as codes.cuh says. Tiles, the number of rows and what
// the rows are change none of that.

#pragma once

#include "codes.cuh"
#include "copies.cuh"
#include "operands.cuh"

namespace deepinfer {

// MT x 16 outputs and NT x 8 rows per warp, STAGES blocks of K on their way at once, TEAMS blocks of
// threads on a multiprocessor.
template <int BITS_, int MT_, int NT_, int STAGES_, int TEAMS_>
struct Few {
  static constexpr int BITS = BITS_, MT = MT_, NT = NT_, STAGES = STAGES_;
  static constexpr int TEAMS = TEAMS_;
  using Read = Reader<BITS, MT>;
  static constexpr int kOutputs = 16 * MT, kRows = 8 * NT, kWarps = 8;  // warps at most
  static constexpr int kRing = STAGES * Read::kBytes, kSums = kOutputs * kRows * 4;  // of a warp
  static constexpr int kBytes = kRing > kSums ? kRing : kSums;
};

// One block of K for the first LIVE x 8 rows; x is read anew for the next one, where there is any.
template <class F, int LIVE, bool HOT>
__device__ __forceinline__ void block_of(uint32_t codes, const uint32_t* scales, int t,
                                         const Signs& signs, uint4 (&x)[F::NT][4], const uint4* const (&next)[F::NT],
                                         const bool (&more)[F::NT], float (&sum)[F::MT][F::NT][4],
                                         uint32_t (&nan)[2 * F::MT]) {
  constexpr int BITS = F::BITS, kRows = 2 * F::MT, kPieces = BITS / 4;
  uint32_t by[kRows];
  uint4 piece[kRows];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i == 0 || piece_of<BITS>(i) != piece_of<BITS>(i - 1)) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        piece[r] = load_16(codes + (r * kPieces + piece_of<BITS>(i)) * 512);
        by[r] = factor<BITS, HOT>(scales[r], scale_of<BITS>(t, piece_of<BITS>(i)));
      }
    }
    uint32_t b[LIVE][4];
#pragma unroll
    for (int c = 0; c < LIVE; ++c) {
      paired<BITS>(x[c][i], b[c]);
      if (more[c]) x[c][i] = __ldg(next[c] + (x_of<BITS>(0, i)));
    }
#pragma unroll
    for (int m = 0; m < F::MT; ++m) {
      uint32_t a[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        decoded<BITS, HOT>(piece[2 * m + h], i, by[2 * m + h], signs, a[h], nan[2 * m + h]);
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int c = 0; c < LIVE; ++c) {
          multiply_add(sum[m][c], a[0][2 * s], a[1][2 * s], a[0][2 * s + 1], a[1][2 * s + 1],
                       b[c][2 * s], b[c][2 * s + 1]);
        }
      }
    }
  }
}

// A block of threads has `parts` warps for each `kOutputs` outputs.
template <class F>
__global__ void __launch_bounds__(32 * F::kWarps, F::TEAMS) few_rows(const Operands given) {
  extern __shared__ uint4 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int parts = given.parts, part = warp % parts, sets = blockDim.x / 32 / parts;
  const int first = (blockIdx.x * sets + warp / parts) * F::kOutputs;
  const Tile tile = tile_of(given, blockIdx.z);
  if (tile.live <= 0) return;
  const bool outside = first >= given.n;  // of the last block of threads
  const int begin = part_begin(given, part);
  const int end = outside ? begin : part_begin(given, part + 1);

  typename F::Read reader(given, tile, outside ? 0 : first, begin, g, t);
  const uint32_t ring = shared_address(memory) + warp * F::kRing;
  const uint32_t last = ring + (F::STAGES - 1) * F::Read::kBytes;
#pragma unroll
  for (int s = 0; s < F::STAGES - 1; ++s) {
    if (begin + s < end) reader.copy(ring + s * F::Read::kBytes, lane);
    commit();
  }

  // Rows of x: thread (g, t) needs row 8 c + g, whose missing ones are zero.
  uint4 x[F::NT][4];
  const uint4* next[F::NT];
  bool real[F::NT];
#pragma unroll
  for (int c = 0; c < F::NT; ++c) {
    real[c] = 8 * c + g < tile.live && begin < end;
    next[c] = rows_at(given, tile, real[c] ? 8 * c + g : 0, begin) + x_of<F::BITS>(t, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[c][i] = real[c] ? __ldg(next[c] + x_of<F::BITS>(0, i)) : make_uint4(0, 0, 0, 0);
    }
  }

  float sum[F::MT][F::NT][4] = {};
  uint32_t nan[2 * F::MT] = {};
  uint32_t use = ring, fill = last;
#pragma unroll 1
  for (int b = begin; b < end; ++b) {
    arrived<F::STAGES - 2>();
    __syncwarp();
    if (b + F::STAGES - 1 < end) reader.copy(fill, lane);
    commit();
    uint32_t scales[2 * F::MT], any = 0;
    F::Read::scales(use, g, scales);
#pragma unroll
    for (int r = 0; r < 2 * F::MT; ++r) any |= scales[r];
    bool more[F::NT];
#pragma unroll
    for (int c = 0; c < F::NT; ++c) {
      more[c] = real[c] && b + 1 < end;
      next[c] += 16;
    }
    if (__any_sync(~0u, any & kTops)) {
      block_of<F, F::NT, true>(use + lane * 16, scales, t, given.signs, x, next, more, sum, nan);
    } else if (F::NT == 1 || tile.live <= 8) {
      block_of<F, 1, false>(use + lane * 16, scales, t, given.signs, x, next, more, sum, nan);
    } else {
      block_of<F, F::NT, false>(use + lane * 16, scales, t, given.signs, x, next, more, sum, nan);
    }
    fill = use;
    use = use == last ? ring : use + F::Read::kBytes;
  }

  // Parts in order. The ring is done with: sums take its place.
  arrived<0>();
  __syncthreads();
  auto* const sums = reinterpret_cast<float*>(memory);  // [sets, parts, rows, outputs]
  constexpr int kTile = F::kRows * F::kOutputs;
#pragma unroll
  for (int r = 0; r < 2 * F::MT; ++r) {
    const bool bad = F::BITS == 8 && seen(nan[r]);
#pragma unroll
    for (int c = 0; c < F::NT; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * c + 2 * t + e, output = r * 8 + g;
        sums[warp * kTile + row * F::kOutputs + output] =
            bad ? __int_as_float(0x7FFFFFFF) : sum[r / 2][c][r % 2 * 2 + e];
      }
    }
  }
  __syncthreads();
  const int rows = min(tile.live, F::kRows);
  for (int i = threadIdx.x; i < sets * rows * F::kOutputs; i += blockDim.x) {
    const int output = i % F::kOutputs, row = i / F::kOutputs % rows, set = i / F::kOutputs / rows;
    const int n = (blockIdx.x * sets + set) * F::kOutputs + output;
    if (n >= given.n) continue;
    const float* at = sums + set * parts * kTile + row * F::kOutputs + output;
    float total = at[0];
    for (int p = 1; p < parts; ++p) total += at[p * kTile];
    store(given, tile, row, n, total);
  }
}

}  // namespace deepinfer

// Products of many rows with stored weights, in the order of few.cuh: a warp decodes its weights
// once for 64 rows, which all warps of a block of threads share.
//
// Of every eight values of a row of x the pairs that meet codes lie side by side here already, in
// the order of `paired`.

#pragma once

#include "codes.cuh"
#include "copies.cuh"
#include "operands.cuh"

namespace deepinfer {

// MT x 16 outputs and NT x 8 rows per warp, WARPS of them. The parts of K one after the other, or
// APART: each in blocks of threads of its own, with a result of its own in float32, without bias.
template <int BITS_, int MT_, int NT_, int WARPS_, int STAGES_, bool APART_>
struct Many {
  static constexpr int BITS = BITS_, MT = MT_, NT = NT_, WARPS = WARPS_, STAGES = STAGES_;
  static constexpr bool APART = APART_;
  using Read = Reader<BITS, MT>;
  static constexpr int kRows = 8 * NT, kOutputs = 16 * MT, kThreads = 32 * WARPS;
  static constexpr int kX = kRows * 256;  // bytes of a stage's rows, which lie before its weights
  static constexpr int kStage = kX + WARPS * Read::kBytes;
  static constexpr int kSums = MT * NT * 4;  // of a thread
  static constexpr int kBytes = STAGES * kStage + (APART ? 0 : kSums * kThreads * 4);
};

// Where thread t's i-th 16 bytes of a row lie: no two that are read together share banks.
__device__ __forceinline__ int place_of(int row, int t, int i) {
  return row * 256 + ((i * 4 + t) ^ (row % 2 * 4)) * 16;
}

// One block of K for the first LIVE x 8 rows.
template <class F, int LIVE, bool HOT>
__device__ __forceinline__ void block_of_many(uint32_t x, uint32_t codes, const uint32_t* scales,
                                              int g, int t, const Signs& signs,
                                              float (&sum)[F::MT][F::NT][4],
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
    uint32_t a[kRows][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      decoded<BITS, HOT>(piece[r], i, by[r], signs, a[r], nan[r]);
    }
    // Sums that do not wait for each other come one after the other.
    constexpr int kSide = 4;
#pragma unroll
    for (int first = 0; first < LIVE; first += kSide) {
      uint4 b[kSide];
#pragma unroll
      for (int c = 0; c < kSide; ++c) b[c] = load_16(x + place_of(8 * (first + c) + g, t, i));
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int c = 0; c < kSide; ++c) {
#pragma unroll
          for (int m = 0; m < F::MT; ++m) {
            multiply_add(sum[m][first + c], a[2 * m][2 * s], a[2 * m + 1][2 * s],
                         a[2 * m][2 * s + 1], a[2 * m + 1][2 * s + 1], s ? b[c].z : b[c].x,
                         s ? b[c].w : b[c].y);
          }
        }
      }
    }
  }
}

template <class F>
__global__ void __launch_bounds__(F::kThreads) many_rows(const Operands given) {
  extern __shared__ uint4 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int own_part = F::APART ? blockIdx.z % given.parts : 0;
  const Tile tile = tile_of(given, F::APART ? blockIdx.z / given.parts : blockIdx.z);
  if (tile.live <= 0) return;
  const int begin = F::APART ? part_begin(given, own_part) : 0;
  const int stop = F::APART ? part_begin(given, own_part + 1) : given.blocks;
  const int first = (blockIdx.x * F::WARPS + warp) * F::kOutputs;
  const bool outside = first >= given.n;
  const uint32_t ring = shared_address(memory);
  typename F::Read reader(given, tile, outside ? 0 : first, begin, g, t);

  // Rows that this thread copies: every (kThreads / 16)-th, one piece of 16 of each.
  constexpr int kEach = F::kRows * 16 / F::kThreads, kApart = F::kThreads / 16;
  const int own_row = threadIdx.x / 16, of = threadIdx.x % 16 / 4, which = threadIdx.x % 4;
  const uint4* rows = rows_at(given, tile, own_row, begin) + x_of<F::BITS>(of, which);
  const int64_t apart = static_cast<int64_t>(kApart) * given.groups * given.blocks * 16;
  const int needed = (tile.live + 7) / 8 * 8;
  auto copy = [&](uint32_t to) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int row = own_row + e * kApart;
      const bool real = row < tile.live;
      copy_16_if(to + place_of(row, of, which), real ? rows + e * apart : given.x, real);
    }
    rows += 16;
    reader.copy(to + F::kX + warp * F::Read::kBytes, lane);
  };
#pragma unroll
  for (int s = 0; s < F::STAGES - 1; ++s) {
    if (begin + s < stop) copy(ring + s * F::kStage);
    commit();
  }

  float sum[F::MT][F::NT][4] = {};
  uint32_t nan[2 * F::MT] = {};
  const uint32_t last = ring + (F::STAGES - 1) * F::kStage;
  uint32_t use = ring, fill = last;
  int part = 0, end = part_begin(given, 1);
  // Of the parts before, a thread's own.
  float* const totals = reinterpret_cast<float*>(memory) + F::STAGES * F::kStage / 4 + threadIdx.x;
#pragma unroll 1
  for (int b = begin; b < stop; ++b) {
    arrived<F::STAGES - 2>();
    __syncthreads();
    if (b + F::STAGES - 1 < stop) copy(fill);
    commit();
    const uint32_t mine = use + F::kX + warp * F::Read::kBytes;
    uint32_t scales[2 * F::MT], any = 0;
    F::Read::scales(mine, g, scales);
#pragma unroll
    for (int r = 0; r < 2 * F::MT; ++r) any |= scales[r];
    if (__any_sync(~0u, any & kTops)) {
      block_of_many<F, F::NT, true>(use, mine + lane * 16, scales, g, t, given.signs, sum, nan);
    } else if (needed <= F::kRows / 2) {
      block_of_many<F, F::NT / 2, false>(use, mine + lane * 16, scales, g, t, given.signs, sum, nan);
    } else {
      block_of_many<F, F::NT, false>(use, mine + lane * 16, scales, g, t, given.signs, sum, nan);
    }
    fill = use;
    use = use == last ? ring : use + F::kStage;
    if (!F::APART && b + 1 == end && end < stop) {  // the parts are added in order
#pragma unroll
      for (int m = 0; m < F::MT; ++m) {
#pragma unroll
        for (int c = 0; c < F::NT; ++c) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& total = totals[((m * F::NT + c) * 4 + e) * F::kThreads];
            total = part ? total + sum[m][c][e] : sum[m][c][e];
            sum[m][c][e] = 0;
          }
        }
      }
      ++part;
      end = part_begin(given, part + 1);
    }
  }

#pragma unroll
  for (int r = 0; r < 2 * F::MT; ++r) {
    const bool bad = F::BITS == 8 && seen(nan[r]);
#pragma unroll
    for (int c = 0; c < F::NT; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * c + 2 * t + e;
        const int of = r % 2 * 2 + e;
        float made = sum[r / 2][c][of];
        if (!F::APART && part) made = totals[((r / 2 * F::NT + c) * 4 + of) * F::kThreads] + made;
        if (bad) made = __int_as_float(0x7FFFFFFF);
        if (row >= tile.live || outside) continue;
        if constexpr (F::APART) {
          store_part(given, tile, own_part, row, first + r * 8 + g, made);
        } else {
          store(given, tile, row, first + r * 8 + g, made);
        }
      }
    }
  }
}

}  // namespace deepinfer

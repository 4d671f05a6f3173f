// What a product is given, where things lie in it, and how a warp reads its weights.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "codes.cuh"
#include "copies.cuh"

namespace deepinfer {

struct Weight {
  const uint8_t* codes;
  const uint8_t* scale;
  void* out;
};

// Rows x [M, G, K] times weights [layers, E, N, K] -> [M, G, N]. Of experts, G is 1 and the rows
// come in tiles of one expert; of a plain weight E is G.
struct Operands {
  Weight weight[2];       // experts may have two, side by side in the grid
  const uint4* x;
  const float* bias;      // [G * N] or null
  const int32_t* layer;
  const int32_t* expert;  // [tiles], or null
  const int32_t* live;    // [tiles]
  const int32_t* used;
  int m, n, blocks, parts, groups, weights, tile_rows;
  int scale_rows;         // of one weight
  bool by_block;          // a scale for 32 rows
  bool wide;              // the result is float32, else bfloat16
  Signs signs;
};

struct Tile {
  Weight weight;
  int64_t row;    // the tile's first
  int64_t index;  // of the weight, in its stack
  int live, group;
};

// which: of two weights, or of groups.
__device__ __forceinline__ Tile tile_of(const Operands& given, int which) {
  Tile tile;
  const int number = blockIdx.y, layer = *given.layer;
  tile.row = static_cast<int64_t>(number) * given.tile_rows;
  if (given.expert) {
    const int expert = given.expert[number], live = given.live[number], used = *given.used;
    tile.group = 0;
    tile.weight = given.weight[which];
    tile.live = number < used ? live : 0;
    tile.index = static_cast<int64_t>(layer) * given.weights + expert;
  } else {
    tile.group = which;
    tile.weight = given.weight[0];
    tile.live = min(given.tile_rows, given.m - number * given.tile_rows);
    tile.index = static_cast<int64_t>(layer) * given.weights + tile.group;
  }
  return tile;
}

// Blocks of K before a part.
__device__ __forceinline__ int part_begin(const Operands& given, int part) {
  return given.blocks / given.parts * part;
}

__device__ __forceinline__ const uint4* rows_at(const Operands& given, const Tile& tile, int row,
                                                int block) {
  const int64_t at = (tile.row + row) * given.groups + tile.group;
  return given.x + at * (given.blocks * 16) + block * 16;
}

__device__ __forceinline__ int64_t place_of_result(const Operands& given, const Tile& tile, int row,
                                                   int n) {
  return ((tile.row + row) * given.groups + tile.group) * given.n + n;
}

__device__ __forceinline__ void store_part(const Operands& given, const Tile& tile, int part,
                                           int row, int n, float total) {
  const int64_t each = static_cast<int64_t>(given.m) * given.groups * given.n;
  static_cast<float*>(tile.weight.out)[part * each + place_of_result(given, tile, row, n)] = total;
}

__device__ __forceinline__ void store(const Operands& given, const Tile& tile, int row, int n,
                                      float total) {
  if (given.bias) total += given.bias[tile.group * given.n + n];
  const int64_t at = place_of_result(given, tile, row, n);
  if (given.wide) {
    static_cast<float*>(tile.weight.out)[at] = total;
  } else {
    static_cast<__nv_bfloat16*>(tile.weight.out)[at] = __float2bfloat16_rn(total);
  }
}

// How a warp copies a block of 128 of K of 16 MT rows of a weight: thread (g, t) the pieces of 16
// bytes that it will multiply, of rows g and g + 8 of each 16, and one row's scales.
template <int BITS, int MT>
struct Reader {
  static constexpr int kPieces = BITS / 4, kRows = 2 * MT;            // of a thread
  static constexpr int kCodes = kRows * kPieces * 32 * 16;            // bytes of a warp
  static constexpr int kBytes = kCodes + kRows * 8 * 4;               // with scales

  const uint8_t* codes[kRows];
  const uint8_t* scale;

  __device__ __forceinline__ Reader(const Operands& given, const Tile& tile, int first, int block,
                                    int g, int t) {
    const int64_t width = given.blocks * (16 * BITS);
    const uint8_t* from =
        tile.weight.codes + (tile.index * given.n + first + g) * width + block * 16 * BITS + 16 * t;
#pragma unroll
    for (int r = 0; r < kRows; ++r) codes[r] = from + r * 8 * width;
    int row = (given.expert ? 0 : tile.group * given.n) + first + min(t, kRows - 1) * 8 + g;
    if (given.by_block) row /= 32;
    const int64_t stack = given.expert ? tile.index : tile.index / given.weights;
    scale = tile.weight.scale + (stack * given.scale_rows + row) * (given.blocks * 4) + block * 4;
  }

  __device__ __forceinline__ void copy(uint32_t to, int lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        copy_16(to + ((r * kPieces + p) * 32 + lane) * 16, codes[r] + 64 * p);
      }
      codes[r] += 16 * BITS;
    }
    if (lane % 4 < kRows) copy_4(to + kCodes + (lane / 4 * kRows + lane % 4) * 4, scale);
    scale += 4;
  }

  // Scales of the rows of a thread.
  static __device__ __forceinline__ void scales(uint32_t from, int g, uint32_t (&out)[kRows]) {
    if constexpr (kRows == 4) {
      const uint4 four = load_16(from + kCodes + g * 16);
      out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
    } else {
      const uint2 two = load_8(from + kCodes + g * 8);
      out[0] = two.x, out[1] = two.y;
    }
  }
};

// Whether four threads that share a row saw a NaN in it.
__device__ __forceinline__ bool seen(uint32_t nan) {
  nan |= __shfl_xor_sync(~0u, nan, 1);
  nan |= __shfl_xor_sync(~0u, nan, 2);
  return nan & kTops;
}

}  // namespace deepinfer

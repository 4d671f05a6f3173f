// kernels_bridge/csrc/cuda/codes.cuh on a CPU, for test_cuda.py: what the chip's instructions do is
// written out, everything else is the source of the kernels.

#include <cstdint>
#include <cstring>

struct uint4 {
  uint32_t x, y, z, w;
};

#define __device__
#define __forceinline__ inline

static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>(bytes >> ((selector >> 4 * i & 7) * 8) & 0xFF) << 8 * i;
  }
  return out;
}

#include "codes.cuh"

static float wide(uint32_t bits) {
  float value;
  bits <<= 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

static uint32_t narrow(float value) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

namespace deepinfer {

uint32_t times(uint32_t a, uint32_t b) {
  const uint32_t low = narrow(wide(a & 0xFFFF) * wide(b & 0xFFFF));
  return low | narrow(wide(a >> 16) * wide(b >> 16)) << 16;
}

uint32_t picked(uint32_t mask, uint32_t word, uint32_t other) {
  return (word & mask) | (other & ~mask);
}

template <int BITS, bool HOT>
static uint32_t decode(const uint4* pieces, uint32_t scales, int t, uint32_t* out) {
  uint32_t nan = 0;
  for (int i = 0; i < 4; ++i) {
    const int piece = piece_of<BITS>(i);
    const uint32_t by = factor<BITS, HOT>(scales, scale_of<BITS>(t, piece));
    uint32_t pairs[4];
    decoded<BITS, HOT>(pieces[piece], i, by, kSigns, pairs, nan);
    std::memcpy(out + 4 * i, pairs, sizeof pairs);
  }
  return nan & kTops;
}

template <int BITS>
static uint32_t decode(const uint4* pieces, uint32_t scales, int t, uint32_t* out) {
  return scales & kTops ? decode<BITS, true>(pieces, scales, t, out)
                        : decode<BITS, false>(pieces, scales, t, out);
}

template <int BITS>
static void pair(const uint4* x, int t, uint32_t* out) {
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs[4];
    paired<BITS>(x[x_of<BITS>(t, i)], pairs);
    std::memcpy(out + 4 * i, pairs, sizeof pairs);
  }
}

}  // namespace deepinfer

// A thread's 32 values of a block of a row of codes as 16 pairs of bfloat16, in the order in which
// they are multiplied; what is not 0 is returned where one is NaN, whatever it was made of.
extern "C" uint32_t decode(int bits, const uint4* block, uint32_t scales, int t, uint32_t* out) {
  const uint4 pieces[2] = {block[t], block[bits == 4 ? t : t + 4]};
  return bits == 4 ? deepinfer::decode<4>(pieces, scales, t, out)
                   : deepinfer::decode<8>(pieces, scales, t, out);
}

// A thread's 32 values of a block of a row of x, bfloat16, as the pairs that meet those.
extern "C" void pair(int bits, const uint4* block, int t, uint32_t* out) {
  bits == 4 ? deepinfer::pair<4>(block, t, out) : deepinfer::pair<8>(block, t, out);
}

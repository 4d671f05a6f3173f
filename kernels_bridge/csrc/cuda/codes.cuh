// FP4 and FP8 codes to bfloat16, two in a register, exactly.
//
// Sign, exponent and mantissa of a code go to their places in bfloat16. That number is too small by
// a power of two alone, normal or not, and one product by that power and the scale makes it what it
// should be. The product of both powers is a bfloat16 for scales below 2; beyond that (`hot`) they
// are multiplied one after the other.

#pragma once

#include <cstdint>

namespace deepinfer {

// Two products, each rounded once; and `word` where `mask` has ones, `other` elsewhere, which the
// compiler would make of more instructions. A test on a CPU has its own.
#ifdef __CUDACC__
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ __forceinline__ uint32_t picked(uint32_t mask, uint32_t word, uint32_t other) {
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(made) : "r"(mask), "r"(word), "r"(other));
  return made;
}
#else
uint32_t times(uint32_t a, uint32_t b);
uint32_t picked(uint32_t mask, uint32_t word, uint32_t other);
#endif

// Where the signs of a word's codes are: of every second FP4 code from the first on, and of the
// others or of FP8. As values, since the compiler would not make use of the same signs twice if it
// knew the constants.
struct Signs {
  uint32_t even, odd;
};

constexpr Signs kSigns = {0x08080808, 0x80808080};

template <int BITS>
struct Codes;

// e2m1. Eight values are a word: nibbles 0 .. 7, whose pairs are (0, 4), (1, 5), (2, 6), (3, 7).
// Signs that belong to other nibbles fall on places that are picked from elsewhere.
template <>
struct Codes<4> {
  static constexpr uint32_t kPower = 0x7E807E80;  // 2^126 twice
  static constexpr uint32_t kBase = 0x3F003F00;   // + 128 * scale: 2^126 times the scale, twice
  static constexpr int kWords = 1;                // of eight values

  static __device__ __forceinline__ void placed(const uint32_t* words, const Signs& signs,
                                                uint32_t out[4]) {
    constexpr uint32_t kRest = 0x01C001C0;
    const uint32_t word = words[0], low = word >> 6;
    const uint32_t even = word & signs.even, odd = word & signs.odd;
    out[0] = picked(kRest, word << 6, even << 12);
    out[1] = picked(kRest, word << 2, odd << 8);
    out[2] = picked(kRest, low << 4, even << 4);
    out[3] = picked(kRest, low, odd);
  }
  static __device__ __forceinline__ uint32_t nan_bits(const uint32_t*, const Signs&) {
    return 0;
  }
};

// e4m3. Eight values are two words: bytes 0 .. 3, whose pairs are (0, 2), (1, 3).
template <>
struct Codes<8> {
  static constexpr uint32_t kPower = 0x7B807B80;  // 2^120 twice
  static constexpr uint32_t kBase = 0x3C003C00;
  static constexpr int kWords = 2;

  static __device__ __forceinline__ void placed(const uint32_t* words, const Signs& signs,
                                                uint32_t out[4]) {
    constexpr uint32_t kRest = 0x07F007F0;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t sign = words[w] & signs.odd;
      out[2 * w] = picked(kRest, words[w] << 4, sign << 8);
      out[2 * w + 1] = picked(kRest, words[w] >> 4, sign);
    }
  }
  // The top bit of a byte is set where a value is NaN.
  static __device__ __forceinline__ uint32_t nan_bits(const uint32_t* words,
                                                      const Signs& signs) {
    const uint32_t first = words[0] - (words[0] & signs.odd) + 0x01010101;
    return first | (words[1] - (words[1] & signs.odd) + 0x01010101);
  }
};

constexpr uint32_t kTops = 0x80808080;

// Eight values at once: `i` of four of a thread's part of a block of 128.
//
// FP4: a thread's 16 bytes of a row hold 32 t .. 32 t + 31 of K. FP8: its two pieces of 16 bytes
// hold 16 t .. 16 t + 15 and 64 more. Rows are read 64 bytes at once that way by the four threads
// that share them.
template <int BITS>
__device__ __forceinline__ constexpr int piece_of(int i) {
  return BITS == 4 ? 0 : i / 2;
}

// Which 16 bytes of a block of a row of x, eight values, thread t multiplies with them.
template <int BITS>
__device__ __forceinline__ constexpr int x_of(int t, int i) {
  return BITS == 4 ? 4 * t + i : 8 * (i / 2) + 2 * t + i % 2;
}

// Which of a block's four scales belongs to thread t's piece.
template <int BITS>
__device__ __forceinline__ constexpr int scale_of(int t, int piece) {
  return BITS == 4 ? t : 2 * piece + t / 2;
}

// The factor of one of four scales: for `times` alone, or after one by kPower where hot.
template <int BITS, bool HOT>
__device__ __forceinline__ uint32_t factor(uint32_t scales, uint32_t which) {
  const uint32_t twice = __byte_perm(scales, 0, which | which << 8 | 0x4040);
  if constexpr (!HOT) return twice * 128 + Codes<BITS>::kBase;
  return (twice & 0xFF) ? twice * 128 : 0x00400040;
}

template <int BITS, bool HOT>
__device__ __forceinline__ uint32_t value(uint32_t placed, uint32_t factor) {
  if constexpr (HOT) placed = times(placed, Codes<BITS>::kPower);
  return times(placed, factor);
}

// Eight values of x in a row, as the pairs in which codes come.
template <int BITS>
__device__ __forceinline__ void paired(const uint4& x, uint32_t (&out)[4]) {
  const uint32_t second = BITS == 4 ? x.z : x.y, third = BITS == 4 ? x.y : x.z;
  out[0] = __byte_perm(x.x, second, 0x5410);
  out[1] = __byte_perm(x.x, second, 0x7632);
  out[2] = __byte_perm(third, x.w, 0x5410);
  out[3] = __byte_perm(third, x.w, 0x7632);
}

// The i-th eight of a thread's values as pairs, out of the piece that holds them; `nan` gets
// `nan_bits`.
template <int BITS, bool HOT>
__device__ __forceinline__ void decoded(const uint4& piece, int i, uint32_t factor,
                                        const Signs& signs, uint32_t (&out)[4], uint32_t& nan) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
  const uint32_t* const eight = words + (BITS == 4 ? i : 2 * (i % 2));
  Codes<BITS>::placed(eight, signs, out);
  nan |= Codes<BITS>::nan_bits(eight, signs);
#pragma unroll
  for (int p = 0; p < 4; ++p) out[p] = value<BITS, HOT>(out[p], factor);
}

}  // namespace deepinfer

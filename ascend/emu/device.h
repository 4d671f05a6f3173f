// The instructions of Ascend 950 that our generated sources use, for the system's C++ compiler.
//
// What is missing here is not in the subset and does not compile. Elementary functions are those of
// the C library, division and square root are exact; the device's own may round otherwise.

#pragma once

#include <cmath>

#include "core.h"

#define __ubuf__
#define __gm__
#define __simt_vf__
#define __launch_bounds__(count)
#define threadIdx (emu::lane)
#define block_idx (emu::core->block)

enum event_t : int {};
enum asc_load_l2_cache_mode : int {};
enum asc_store_l2_cache_mode : int {};

constexpr emu::Pipe PIPE_V = emu::kVector, PIPE_MTE2 = emu::kLoad, PIPE_MTE3 = emu::kStore;

namespace cce {
struct dim3 {
  int x;
  explicit dim3(int x) : x(x) {}
};
}  // namespace cce

// -- synchronisation -------------------------------------------------------------------------------

inline void asc_init() {}

#define asc_sync_notify(from, to, id) emu::core->notify(from, to, int(id), __LINE__)
#define asc_sync_wait(from, to, id) emu::core->wait(from, to, int(id), __LINE__)
#define asc_syncthreads() emu::meet(__LINE__)

namespace emu {
inline void meet(int line) {
  if (!core->control.leaves_out(line)) Lanes::current->barrier(line);
}
}  // namespace emu

template <auto F, typename... A>
void asc_vf_call(cce::dim3 size, A... arguments) {
  emu::Core* core = emu::core;
  core->run(emu::kVector, [=] {
    emu::Lanes lanes(size.x, core->control.schedule);
    lanes.run([=] {
      emu::core = core;  // a lane may be a thread
      F(arguments...);
    });
  });
}

// -- copies: `count` bursts of `bytes`, whose starts are strides apart ---------------------------------

inline void asc_copy_gm2ub_align(uint8_t* to, const uint8_t* from, int count, int bytes, int left,
                                 int right, int pad, asc_load_l2_cache_mode, int from_stride,
                                 int to_stride) {
  if (left || right || pad) throw emu::Fault("copies that pad are not emulated");
  emu::Core* core = emu::core;
  core->run(emu::kLoad, [=] {
    for (int64_t i = 0; i < count; ++i) {
      core->check_buffer(to + i * to_stride, bytes);
      core->check_memory(from + i * from_stride, bytes, false);
      std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
    }
  });
}

inline void asc_copy_ub2gm_align(uint8_t* to, const uint8_t* from, int count, int bytes,
                                 asc_store_l2_cache_mode, int to_stride, int from_stride) {
  emu::Core* core = emu::core;
  core->run(emu::kStore, [=] {
    for (int64_t i = 0; i < count; ++i) {
      core->check_buffer(from + i * from_stride, bytes);
      core->check_memory(to + i * to_stride, bytes, true);
      std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
    }
  });
}

// -- numbers ----------------------------------------------------------------------------------------

// Generated sources read and write memory through these whatever else it holds.
#define EMU_WIDE struct __attribute__((may_alias))

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    const bool nan = (wide & 0x7FFFFFFFu) > 0x7F800000u;
    bits = nan ? 0x7FC0 : uint16_t((wide + 0x7FFFu + ((wide >> 16) & 1u)) >> 16);
  }
  explicit operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};

EMU_WIDE bfloat16x2_t { bfloat16_t x, y; };
EMU_WIDE uint1 { uint32_t x; };
EMU_WIDE uint2 { uint32_t x, y; };
EMU_WIDE uint4 { uint32_t x, y, z, w; };
EMU_WIDE float2 { float x, y; };
EMU_WIDE float4 { float x, y, z, w; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float2 operator*(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
inline float2 operator-(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
inline float2 __bfloat1622float2(bfloat16x2_t a) { return {float(a.x), float(a.y)}; }
inline bfloat16x2_t __float22bfloat162_rn(float2 a) { return {bfloat16_t(a.x), bfloat16_t(a.y)}; }

template <typename T>
T max(T a, T b) {
  return a > b ? a : b;
}
template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}

namespace emu {
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
}  // namespace emu

#define rsqrtf emu::inverse_root  // some C libraries have one

namespace tl::limits {
constexpr float kFloatNInf = -__builtin_huge_valf();
}  // namespace tl::limits

// Operands of the handlers.

#pragma once

#include <algorithm>
#include <cstdint>

#include "pages.h"
#include "xla/ffi/api/ffi.h"

namespace deepinfer {

namespace ffi = xla::ffi;

inline ffi::Error refuse(const char* what) { return ffi::Error::InvalidArgument(what); }

inline bool narrow_type(ffi::DataType type) { return type == ffi::BF16 || type == ffi::U16; }

// Calls f with the data as `const uint16_t*` (bfloat16 or its bits) or `const float*`.
template <class F>
bool with_floats(const ffi::AnyBuffer& buffer, const F& f) {
  if (narrow_type(buffer.element_type())) {
    f(static_cast<const uint16_t*>(buffer.untyped_data()));
  } else if (buffer.element_type() == ffi::F32) {
    f(static_cast<const float*>(buffer.untyped_data()));
  } else {
    return false;
  }
  return true;
}

// Whether it is of so many elements.
template <class B>
bool has(const B& buffer, int64_t count) {
  return int64_t(buffer.element_count()) == count;
}

template <class T>
const T* data(const ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

// Entries [sources, P, size, K] in pages [B, G] of every slot.
template <class T>
Pages<T> pages_of(const ffi::AnyBuffer& entries, const T* data, const ffi::Buffer<ffi::S32>& source,
                  const ffi::Buffer<ffi::S32>& pages) {
  const auto shape = entries.dimensions();
  return {data,     pages.typed_data(), source.typed_data()[0], shape[0], shape[1], shape[2],
          shape[3], pages.dimensions()[1]};
}

// Whether every one of `numbers` names one of `count` slots.
inline bool all_slots(const ffi::Buffer<ffi::S32>& numbers, int64_t count) {
  const int32_t* n = numbers.typed_data();
  return std::all_of(n, n + numbers.element_count(),
                     [&](int32_t one) { return one >= 0 && one < count; });
}

}  // namespace deepinfer

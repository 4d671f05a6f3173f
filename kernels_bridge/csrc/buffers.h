// Operands of the handlers: their types, and pages of a cache.

#pragma once

#include <algorithm>
#include <cstdint>

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

template <class T>
const T* data(const ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

// Compressed vectors in pages: data [sources, P, size, K], pages [B, G] of every slot.
template <class T>
struct Pages {
  const T* data;
  const int32_t* table;
  int64_t source, sources, count, size, width, per_slot;

  Pages(const ffi::AnyBuffer& entries, const T* data, const ffi::Buffer<ffi::S32>& source,
        const ffi::Buffer<ffi::S32>& pages)
      : data(data),
        table(pages.typed_data()),
        source(source.typed_data()[0]),
        sources(entries.dimensions()[0]),
        count(entries.dimensions()[1]),
        size(entries.dimensions()[2]),
        width(entries.dimensions()[3]),
        per_slot(pages.dimensions()[1]) {}

  bool known() const { return source >= 0 && source < sources && per_slot * size > 0 && count > 0; }

  const T* at(int64_t slot, int64_t id) const {
    id = std::min(id, per_slot * size - 1);
    const int64_t page = std::min<int64_t>(std::max(table[slot * per_slot + id / size], 0), count - 1);
    return data + ((source * count + page) * size + id % size) * width;
  }
};

// Whether every one of `numbers` names one of `count` slots.
inline bool all_slots(const ffi::Buffer<ffi::S32>& numbers, int64_t count) {
  const int32_t* n = numbers.typed_data();
  return std::all_of(n, n + numbers.element_count(),
                     [&](int32_t one) { return one >= 0 && one < count; });
}

}  // namespace deepinfer

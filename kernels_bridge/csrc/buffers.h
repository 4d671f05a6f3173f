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
  int64_t source, count, size, width, per_slot;

  Pages(const ffi::AnyBuffer& entries, const T* data, const ffi::Buffer<ffi::S32>& source,
        const ffi::Buffer<ffi::S32>& pages)
      : data(data),
        table(pages.typed_data()),
        source(source.typed_data()[0]),
        count(entries.dimensions()[1]),
        size(entries.dimensions()[2]),
        width(entries.dimensions()[3]),
        per_slot(pages.dimensions()[1]) {}

  const T* at(int64_t slot, int64_t id) const {
    id = std::min(id, per_slot * size - 1);
    const int64_t page = std::max(table[slot * per_slot + id / size], 0);
    return data + ((source * count + page) * size + id % size) * width;
  }
};

}  // namespace deepinfer

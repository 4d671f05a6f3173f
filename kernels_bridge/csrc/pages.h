// Pages of a cache.

#pragma once

#include <algorithm>
#include <cstdint>

namespace deepinfer {

// Compressed vectors in pages: data [sources, P, size, K], table [B, G] the pages of every slot.
template <class T>
struct Pages {
  const T* data;
  const int32_t* table;
  int64_t source, sources, count, size, width, per_slot;

  bool known() const { return source >= 0 && source < sources && per_slot * size > 0 && count > 0; }

  const T* at(int64_t slot, int64_t id) const {
    id = std::min(id, per_slot * size - 1);
    const int64_t page = std::min<int64_t>(std::max(table[slot * per_slot + id / size], 0), count - 1);
    return data + ((source * count + page) * size + id % size) * width;
  }
};

}  // namespace deepinfer

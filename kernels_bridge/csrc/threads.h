// Parts of a call on XLA's threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace deepinfer {

namespace ffi = xla::ffi;

constexpr int64_t kParallel = 1 << 20;  // multiplications that are worth waking a second thread

// f(part) for part 0 .. count - 1, helped by the pool where `work` is worth it. The caller takes
// parts itself and waits only for parts that a helper has begun, so a busy pool never blocks it.
template <class F>
void in_parts(ffi::ThreadPool pool, int64_t count, int64_t work, const F& f) {
  const int64_t helpers =
      work < kParallel ? 0 : std::min(count, int64_t(pool.num_threads())) - 1;
  if (helpers <= 0) {
    for (int64_t part = 0; part < count; ++part) f(part);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all;
    const F* f;
    int64_t count;
    void take() {
      int64_t part;
      while ((part = next.fetch_add(1)) < count) {
        (*f)(part);
        if (done.fetch_add(1) + 1 == count) {
          std::lock_guard<std::mutex> lock(mutex);
          all.notify_all();
        }
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->f = &f;
  shared->count = count;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->take(); });
  shared->take();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all.wait(lock, [&] { return shared->done.load() == count; });
}

}  // namespace deepinfer

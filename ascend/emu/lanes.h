// SIMT lanes of one vector function: one after the other on stacks of their own, or as threads.
//
// By itself a lane runs until it meets a barrier or ends, then the next one does. In which order is a
// schedule: a function whose lanes meet at every barrier they need has the same result in all of
// them. With EMU_THREADS lanes are threads of the machine, for ThreadSanitizer.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef EMU_THREADS
#include <condition_variable>
#include <mutex>
#include <thread>
#else
#include <ucontext.h>
#endif

namespace emu {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// xorshift64*: small, and the same everywhere.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint32_t below(uint32_t n) {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return uint32_t((state_ * 0x2545F4914F6CDD1Du) >> 33) % n;
  }

 private:
  uint64_t state_;
};

// 0: ascending, 1: descending, any other: shuffled.
inline std::vector<int> order(int n, int schedule) {
  std::vector<int> made(n);
  std::iota(made.begin(), made.end(), 0);
  if (schedule == 1) {
    for (int i = 0; i < n; ++i) made[i] = n - 1 - i;
  } else if (schedule > 1) {
    Dice dice(schedule);
    for (int i = n - 1; i > 0; --i) std::swap(made[i], made[dice.below(i + 1)]);
  }
  return made;
}

struct Place {
  int32_t x = 0;
};

inline thread_local Place lane;

#ifdef EMU_THREADS

class Lanes {
 public:
  Lanes(int count, int) : count_(count) {}

  void run(const std::function<void()>& body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count_; ++i) {
      threads.emplace_back([this, i, &body] {
        lane.x = i;
        current = this;
        body();
      });
    }
    for (auto& each : threads) each.join();
  }

  void barrier(int) {
    std::unique_lock<std::mutex> hold(mutex_);
    const int64_t turn = turn_;
    if (++waiting_ == count_) {
      waiting_ = 0;
      ++turn_;
      all_.notify_all();
    } else {
      all_.wait(hold, [&] { return turn_ != turn; });
    }
  }

  static inline thread_local Lanes* current = nullptr;

 private:
  const int count_;
  int waiting_ = 0;
  int64_t turn_ = 0;
  std::mutex mutex_;
  std::condition_variable all_;
};

#else

class Lanes {
 public:
  Lanes(int count, int schedule)
      : count_(count), order_(order(count, schedule)), at_(count), waits_(count, kRunning) {}

  // Raises Fault where lanes part: some wait at a barrier that others do not reach.
  void run(const std::function<void()>& body) {
    body_ = &body;
    current = this;
    stacks_.reset(new char[size_t(count_) * kStack]);
    for (int i = 0; i < count_; ++i) {
      getcontext(&at_[i]);
      at_[i].uc_stack.ss_sp = stacks_.get() + size_t(i) * kStack;
      at_[i].uc_stack.ss_size = kStack;
      at_[i].uc_link = &home_;
      makecontext(&at_[i], &Lanes::enter, 0);
    }
    while (phase()) {
    }
  }

  void barrier(int line) {
    const int me = lane.x;
    waits_[me] = line;
    swapcontext(&at_[me], &home_);
    lane.x = me;
  }

  static inline thread_local Lanes* current = nullptr;

 private:
  enum { kRunning = -1, kEnded = -2 };
  static constexpr size_t kStack = 64 * 1024;

  static void enter() {
    Lanes* self = current;
    const int me = lane.x;
    (*self->body_)();
    self->waits_[me] = kEnded;
  }

  // Every lane up to its next barrier; whether there is another phase.
  bool phase() {
    for (int i : order_) {
      lane.x = i;
      swapcontext(&home_, &at_[i]);
    }
    for (int i = 1; i < count_; ++i) {
      if (waits_[i] != waits_[0]) throw Fault(parted(i));
    }
    return waits_[0] != kEnded;
  }

  std::string parted(int i) const {
    const auto said = [](int line) {
      return line == kEnded ? std::string("ended") : "waits at line " + std::to_string(line);
    };
    return "lanes part at a barrier: lane 0 " + said(waits_[0]) + ", lane " + std::to_string(i) +
           " " + said(waits_[i]);
  }

  const int count_;
  const std::vector<int> order_;
  std::vector<ucontext_t> at_;
  std::vector<int> waits_;
  std::unique_ptr<char[]> stacks_;
  ucontext_t home_;
  const std::function<void()>* body_ = nullptr;
};

#endif

}  // namespace emu

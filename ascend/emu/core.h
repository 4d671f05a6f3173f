// One vector core: its unified buffer, its pipes, the events between them, and what it may touch.
//
// Copies and vector functions are queued on their pipes, as on the device, and run when the kernel
// has issued all: a pipe keeps its own order and waits for events of others, and for nothing else.
// Which of the pipes that could go on does is a schedule; a kernel that waits for all it needs has the
// same result in all of them.

#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <tuple>

#include "lanes.h"

namespace emu {

enum Pipe { kVector, kLoad, kStore, kPipes };

struct Range {
  unsigned char* first;
  size_t bytes;
  bool written;  // a result
};

// What a check changes: the schedule, and instructions (by line of the generated source) left out.
struct Control {
  int schedule = 0;
  int without[2] = {0, 0};
  bool leaves_out(int line) const { return line == without[0] || line == without[1]; }
};

class Core {
 public:
  // Of the 248 KiB, 32 hold the state of SIMT lanes.
  static constexpr size_t kBuffer = 216 * 1024;
  static constexpr size_t kAligned = 32;

  Core(int block, const Control& control, const std::vector<Range>& memory)
      : block(block), control(control), memory_(memory), dice_(control.schedule) {
    held_.assign(kBuffer + kAligned, poison());
    const size_t off = reinterpret_cast<uintptr_t>(held_.data()) % kAligned;
    buffer_ = held_.data() + (kAligned - off) % kAligned;
  }

  unsigned char* buffer() { return buffer_; }
  // Fills what nothing was written to; another one in every second schedule.
  unsigned char poison() const { return control.schedule % 2 ? 0x3C : 0xFF; }

  void run(Pipe pipe, std::function<void()> work) {
    queues_[pipe].push_back({kRun, std::move(work), {}, 0, issued_++});
  }
  void notify(Pipe from, Pipe to, int id, int line) {
    if (control.leaves_out(line)) return;
    queues_[from].push_back({kSet, nullptr, {from, to, id}, line, issued_++});
  }
  void wait(Pipe from, Pipe to, int id, int line) {
    if (control.leaves_out(line)) return;
    queues_[to].push_back({kWait, nullptr, {from, to, id}, line, issued_++});
  }

  // Runs everything that was issued. Raises Fault where a pipe waits for ever or an event is lost.
  void settle() {
    while (true) {
      std::vector<int> able;
      for (int pipe = 0; pipe < kPipes; ++pipe) {
        if (can(pipe)) able.push_back(pipe);
      }
      if (able.empty()) break;
      step(choose(able));
    }
    for (const auto& queue : queues_) {
      if (queue.empty()) continue;
      throw Fault("line " + std::to_string(queue.front().line) + " waits for an event that is never set");
    }
    for (const auto& [event, line] : raised_) {
      if (line) throw Fault("the event set at line " + std::to_string(line) + " is never awaited");
    }
  }

  void check_buffer(const unsigned char* at, size_t bytes) const {
    if (at < buffer_ || at + bytes > buffer_ + kBuffer) {
      throw Fault("a copy leaves the unified buffer of " + std::to_string(kBuffer) + " bytes");
    }
    if (size_t(at - buffer_) % kAligned) throw Fault("a copy starts inside of 32 bytes of the buffer");
  }
  void check_memory(const unsigned char* at, size_t bytes, bool write) const {
    for (const auto& each : memory_) {
      if (at >= each.first && at + bytes <= each.first + each.bytes && (!write || each.written)) return;
    }
    throw Fault(write ? "a copy writes outside of the results" : "a copy reads outside of the operands");
  }

  const int block;
  const Control control;

 private:
  enum Kind { kRun, kSet, kWait };
  using Event = std::tuple<int, int, int>;
  struct Step {
    Kind kind;
    std::function<void()> work;
    Event event;
    int line;
    int64_t issue;
  };

  bool can(int pipe) {
    if (queues_[pipe].empty()) return false;
    const Step& next = queues_[pipe].front();
    return next.kind != kWait || raised_[next.event];
  }

  // 0: what was issued first, 1: what was issued last, any other: at random.
  int choose(const std::vector<int>& able) {
    const auto older = [this](int a, int b) {
      return queues_[a].front().issue < queues_[b].front().issue;
    };
    if (control.schedule == 0) return *std::min_element(able.begin(), able.end(), older);
    if (control.schedule == 1) return *std::max_element(able.begin(), able.end(), older);
    return able[dice_.below(uint32_t(able.size()))];
  }

  void step(int pipe) {
    Step next = std::move(queues_[pipe].front());
    queues_[pipe].pop_front();
    if (next.kind == kRun) next.work();
    if (next.kind == kWait) raised_[next.event] = 0;
    if (next.kind != kSet) return;
    int& line = raised_[next.event];
    if (line) {
      throw Fault("line " + std::to_string(next.line) + " sets an event that line " +
                  std::to_string(line) + " set and nobody awaited");
    }
    line = next.line;
  }

  const std::vector<Range>& memory_;
  Dice dice_;
  std::vector<unsigned char> held_;
  unsigned char* buffer_ = nullptr;
  std::deque<Step> queues_[kPipes];
  std::map<Event, int> raised_;
  int64_t issued_ = 0;
};

inline thread_local Core* core = nullptr;

// Operands and results of a kernel, in one list.
struct Arrays {
  std::vector<Range> memory;
  std::vector<std::vector<int64_t>> shapes;

  template <typename T>
  T* data(int i) const {
    return reinterpret_cast<T*>(memory[i].first);
  }
  int32_t size(int i, int axis) const { return int32_t(shapes[i][axis]); }
};

// Every block of the grid, one after the other. Raises Fault.
template <typename Kernel>
void launch(const Arrays& arrays, int blocks, const Control& control, Kernel kernel) {
  const unsigned char poison = control.schedule % 2 ? 0x3C : 0xFF;
  for (const auto& each : arrays.memory) {
    if (each.written && each.bytes) std::memset(each.first, poison, each.bytes);
  }
  for (int block : order(blocks, control.schedule)) {
    Core one(block, control, arrays.memory);
    core = &one;
    kernel(arrays);
    one.settle();
    core = nullptr;
  }
}

}  // namespace emu

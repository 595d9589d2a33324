// A flag that is set once and can be waited for: one futex, no mutex, so that a request stays small.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace deepnvme {

class Completion {
 public:
  bool is_set() const { return state_.load(std::memory_order_acquire) == kSet; }

  // Everything written before set() is visible to whoever sees it set.
  void set();

  // Whether it was set within `limit`. Returns early, unset, when a signal arrives: the caller may have a signal
  // handler to run (Python's), and waits again.
  bool wait_for(std::chrono::nanoseconds limit) const;

 private:
  static constexpr uint32_t kUnset = 0, kAwaited = 1, kSet = 2;
  // kAwaited tells set() that someone sleeps; without a sleeper it needs no system call.
  mutable std::atomic<uint32_t> state_{kUnset};
};

}  // namespace deepnvme

#include "completion.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace deepnvme {

void Completion::set() {
  if (state_.exchange(kSet, std::memory_order_acq_rel) == kAwaited) {
    ::syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool Completion::wait_for(std::chrono::nanoseconds limit) const {
  uint32_t seen = kUnset;
  if (!state_.compare_exchange_strong(seen, kAwaited, std::memory_order_acq_rel) && seen == kSet) return true;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec relative{};
  relative.tv_sec = seconds.count();
  relative.tv_nsec = (limit - seconds).count();
  // The kernel compares again before it sleeps, so a set() in between is not missed.
  ::syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, kAwaited, &relative, nullptr, 0);
  return is_set();
}

}  // namespace deepnvme

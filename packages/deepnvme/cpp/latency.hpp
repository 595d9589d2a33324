// How long the drive took for each piece, as counts in buckets that grow with the latency.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace deepnvme {

class LatencyHistogram {
 public:
  void add(uint64_t nanoseconds) { counts_[bucket_of(nanoseconds)].fetch_add(1, std::memory_order_relaxed); }

  // (upper bound in nanoseconds, count) of every bucket that is not empty, ascending.
  std::vector<std::pair<uint64_t, uint64_t>> counts() const {
    std::vector<std::pair<uint64_t, uint64_t>> found;
    for (size_t i = 0; i < counts_.size(); ++i) {
      if (const uint64_t n = counts_[i].load(std::memory_order_relaxed)) found.emplace_back(bound_of(i), n);
    }
    return found;
  }

 private:
  // Each power of two is cut into 16, so a bound is at most 1/16 above what was measured.
  static constexpr size_t kSteps = 16;

  static size_t bucket_of(uint64_t value) {
    if (value < kSteps) return value;
    const size_t exponent = static_cast<size_t>(std::bit_width(value)) - 5;  // value >> exponent is in [16, 32)
    return kSteps * (exponent + 1) + static_cast<size_t>(value >> exponent) - kSteps;
  }
  static uint64_t bound_of(size_t bucket) {
    if (bucket < kSteps) return bucket;
    const size_t exponent = bucket / kSteps - 1;
    return ((kSteps + bucket % kSteps + 1) << exponent) - 1;
  }

  std::array<std::atomic<uint64_t>, kSteps * 61> counts_{};
};

}  // namespace deepnvme

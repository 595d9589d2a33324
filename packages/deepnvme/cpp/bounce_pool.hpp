// A little memory, on huge pages or else contiguous, through which misaligned transfers pass, again and again.
#pragma once

#include <cstddef>
#include <vector>

#include "aligned_memory.hpp"

namespace deepnvme {

// Note: few bytes, and low addresses first. What the drive has written into a small pool is still in the cache when it
// is copied from there, and the copy then costs half as much as out of a large one (benchmarks/bounce_cost.py).
class BouncePool {
 public:
  explicit BouncePool(size_t nbytes);

  // A slot of `nbytes`, at most kContiguous; nullptr when there is no room now, or no memory at all. Memory is taken at
  // the first call: an engine that never bounces has none.
  std::byte* take(size_t nbytes);
  void give_back(std::byte* slot, size_t nbytes);
  bool has_room(size_t nbytes) const { return first_fit(nbytes) < used_.size(); }

  // How many bytes may be with the drive at once. The rest is being copied meanwhile: refilling the drive first and
  // copying then is what lets one thread keep it busy, and a quarter of the pool is enough for that.
  size_t in_flight_limit() const { return nbytes_ - nbytes_ / 4; }

  // The most slots that there can be at once.
  size_t most_slots() const { return used_.size(); }

  // What the memory lies on, once it was taken, in words.
  const char* pages() const;

 private:
  static constexpr size_t kUnit = 64 << 10;
  static size_t units(size_t nbytes) { return (nbytes + kUnit - 1) / kUnit; }

  void take_memory();
  // The first of so many free units in a row within one stretch; used_.size() when there are none.
  size_t first_fit(size_t nbytes) const;
  void mark(size_t first, size_t nbytes, bool used);
  std::byte* at(size_t unit) const { return stretches_[unit / per_stretch_].data() + unit % per_stretch_ * kUnit; }
  size_t unit_at(const std::byte* slot) const;

  size_t nbytes_;
  bool huge_;
  size_t per_stretch_;                    // units
  std::vector<AlignedMemory> stretches_;  // one on huge pages, else one for each piece of contiguous memory
  std::vector<bool> used_;                // by unit
};

}  // namespace deepnvme

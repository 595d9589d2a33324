// A few blocks on huge pages through which misaligned transfers pass, again and again.
#pragma once

#include <cstddef>
#include <vector>

#include "aligned_memory.hpp"

namespace deepnvme {

class BouncePool {
 public:
  BouncePool(size_t slots, size_t slot_nbytes) : slots_(slots), slot_nbytes_(slot_nbytes) {}

  // A free slot; nullptr when there is none, or no memory for them. Memory is taken at the first call: an engine that
  // never bounces has none.
  std::byte* take();
  void give_back(std::byte* slot);
  bool has_free() const { return !memory_.data() || !free_.empty(); }

  // How many slots may be with the drive at once. The rest is being copied meanwhile: refilling the drive first and
  // copying then is what lets one thread keep it busy, and a quarter of the slots is enough for that.
  size_t in_flight_limit() const { return slots_ - slots_ / 4; }

 private:
  size_t slots_;
  size_t slot_nbytes_;
  AlignedMemory memory_;
  std::vector<std::byte*> free_;
};

}  // namespace deepnvme

#include "bounce_pool.hpp"

#include "io_error.hpp"

namespace deepnvme {

std::byte* BouncePool::take() try {
  if (!memory_.data()) {
    memory_ = AlignedMemory(slots_ * slot_nbytes_);
    // Handed out last in, first out: few requests at a time keep to few, warm pages.
    for (size_t i = slots_; i-- > 0;) free_.push_back(memory_.data() + i * slot_nbytes_);
  }
  if (free_.empty()) return nullptr;
  std::byte* slot = free_.back();
  free_.pop_back();
  return slot;
} catch (const SystemError&) {
  return nullptr;
}

void BouncePool::give_back(std::byte* slot) { free_.push_back(slot); }

}  // namespace deepnvme

#include "bounce_pool.hpp"

#include <algorithm>

#include "io_error.hpp"

namespace deepnvme {

BouncePool::BouncePool(size_t nbytes) : nbytes_(nbytes), used_(nbytes / kUnit) {}

std::byte* BouncePool::take(size_t nbytes) try {
  if (!memory_.data()) memory_ = AlignedMemory(nbytes_);
  const size_t first = first_fit(nbytes);
  if (first == used_.size()) return nullptr;
  mark(first, nbytes, true);
  return memory_.data() + first * kUnit;
} catch (const SystemError&) {
  return nullptr;
}

void BouncePool::give_back(std::byte* slot, size_t nbytes) {
  mark(static_cast<size_t>(slot - memory_.data()) / kUnit, nbytes, false);
}

size_t BouncePool::first_fit(size_t nbytes) const {
  const size_t wanted = units(nbytes);
  size_t found = 0;
  for (size_t i = 0; i < used_.size(); ++i) {
    found = used_[i] ? 0 : found + 1;
    if (found == wanted) return i + 1 - wanted;
  }
  return used_.size();
}

void BouncePool::mark(size_t first, size_t nbytes, bool used) {
  const auto from = used_.begin() + static_cast<std::ptrdiff_t>(first);
  std::fill(from, from + static_cast<std::ptrdiff_t>(units(nbytes)), used);
}

}  // namespace deepnvme

#include "bounce_pool.hpp"

#include <algorithm>

#include "contiguous_memory.hpp"
#include "io_error.hpp"

namespace deepnvme {

BouncePool::BouncePool(size_t nbytes)
    : nbytes_(nbytes),
      huge_(nbytes >= kHugePage && huge_pages_allowed()),
      per_stretch_((huge_ ? nbytes : kContiguous) / kUnit),
      used_(nbytes / kUnit) {}

std::byte* BouncePool::take(size_t nbytes) try {
  if (stretches_.empty()) take_memory();
  const size_t first = first_fit(nbytes);
  if (first == used_.size()) return nullptr;
  mark(first, nbytes, true);
  return at(first);
} catch (const SystemError&) {
  return nullptr;
}

void BouncePool::give_back(std::byte* slot, size_t nbytes) { mark(unit_at(slot), nbytes, false); }

const char* BouncePool::pages() const {
  const auto contiguous = [](const AlignedMemory& stretch) { return stretch.contiguous(); };
  if (huge_) return "huge pages";
  if (std::all_of(stretches_.begin(), stretches_.end(), contiguous)) return "contiguous memory of io_uring";
  const bool none = std::none_of(stretches_.begin(), stretches_.end(), contiguous);
  return none ? "small pages" : "small pages, in part contiguous memory of io_uring";
}

void BouncePool::take_memory() {
  std::vector<AlignedMemory> taken;
  const size_t stretch = per_stretch_ * kUnit;
  for (size_t done = 0; done < nbytes_; done += stretch) {
    const size_t wanted = std::min(stretch, nbytes_ - done);
    taken.push_back(huge_ ? AlignedMemory(wanted) : AlignedMemory::contiguous_if_possible(wanted));
  }
  stretches_ = std::move(taken);
}

size_t BouncePool::first_fit(size_t nbytes) const {
  const size_t wanted = units(nbytes);
  size_t found = 0;
  for (size_t i = 0; i < used_.size(); ++i) {
    if (i % per_stretch_ == 0) found = 0;
    found = used_[i] ? 0 : found + 1;
    if (found == wanted) return i + 1 - wanted;
  }
  return used_.size();
}

void BouncePool::mark(size_t first, size_t nbytes, bool used) {
  const auto from = used_.begin() + static_cast<std::ptrdiff_t>(first);
  std::fill(from, from + static_cast<std::ptrdiff_t>(units(nbytes)), used);
}

size_t BouncePool::unit_at(const std::byte* slot) const {
  size_t first = 0;
  for (const AlignedMemory& stretch : stretches_) {
    if (slot >= stretch.data() && slot < stretch.data() + stretch.nbytes()) {
      return first + static_cast<size_t>(slot - stretch.data()) / kUnit;
    }
    first += per_stretch_;
  }
  return used_.size();  // none of ours
}

}  // namespace deepnvme

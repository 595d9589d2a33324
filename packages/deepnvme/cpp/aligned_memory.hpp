// Host memory that a drive can reach without a copy: page-aligned, on huge pages where the system has them.
#pragma once

#include <cstddef>

#include "mapping.hpp"

namespace deepnvme {

inline constexpr size_t kPage = 4096;
inline constexpr size_t kHugePage = 2u << 20;

inline constexpr size_t round_down(size_t value, size_t unit) { return value - value % unit; }
inline constexpr size_t round_up(size_t value, size_t unit) { return round_down(value + unit - 1, unit); }

// Whether the system and this process let memory have huge pages when it asks for them.
bool huge_pages_allowed();

class AlignedMemory {
 public:
  AlignedMemory() = default;
  // At least `nbytes` of zeroed memory. From 2 MiB on it starts at a huge page and asks for huge pages.
  // Throws SystemError(ENOMEM).
  explicit AlignedMemory(size_t nbytes);

  // The same, but contiguous if the kernel gives it so (contiguous_memory.hpp), up to kContiguous bytes.
  static AlignedMemory contiguous_if_possible(size_t nbytes);

  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  bool huge_pages() const { return huge_pages_; }  // asked for and allowed
  bool contiguous() const { return contiguous_; }  // without huge pages

  // Keeps the pages in memory (mlock). Returns 0, or the errno: ENOMEM beyond the RLIMIT_MEMLOCK.
  int lock() const;

 private:
  Mapping mapping_;
  std::byte* data_ = nullptr;
  size_t nbytes_ = 0;
  bool huge_pages_ = false;
  bool contiguous_ = false;
};

}  // namespace deepnvme

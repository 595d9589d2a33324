// Memory in one piece physically, where huge pages are not allowed.
#pragma once

#include <cstddef>

#include "mapping.hpp"

namespace deepnvme {

// What is worth asking for at once: the kernel has larger pieces of free memory, but rarely.
inline constexpr size_t kContiguous = 2u << 20;

// `nbytes` (at most kContiguous) of zeroed memory that is few pieces to the drive, as huge pages are. Empty where the
// kernel gives none: it is older than Linux 6.13, io_uring is forbidden, or the memory this user may lock is used up.
Mapping map_contiguous(size_t nbytes);

}  // namespace deepnvme

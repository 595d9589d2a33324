// What the kernel, the filesystem and the drive allow.
#pragma once

#include <optional>
#include <string>

#include "transfer.hpp"

namespace deepnvme {

// What O_DIRECT asks of the file behind `fd` (statx: DIOALIGN). Nothing when the filesystem has no direct I/O for
// it; the careful 4096 when the kernel cannot tell (before 6.1).
std::optional<Alignment> direct_alignment(int fd);

}  // namespace deepnvme

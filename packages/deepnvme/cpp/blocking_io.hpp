// One submission carried out by the calling thread.
#pragma once

#include <unistd.h>

#include <cerrno>

#include "backend.hpp"

namespace deepnvme {

// Bytes moved, or -errno.
inline int64_t move_blocking(const Submission& s) {
  for (;;) {
    const ssize_t n = s.direction == Direction::read
                          ? ::pread(s.fd, s.address, s.nbytes, static_cast<off_t>(s.offset))
                          : ::pwrite(s.fd, s.address, s.nbytes, static_cast<off_t>(s.offset));
    if (n >= 0) return n;
    if (errno != EINTR) return -errno;
  }
}

}  // namespace deepnvme

#include "probe.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cstdint>

namespace deepnvme {
namespace {

#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000U
#endif

// struct statx as the kernel lays it out; the C library's may be older than the two fields wanted here.
struct KernelStatx {
  uint32_t mask;
  unsigned char unused[0x94];
  uint32_t dio_mem_align;
  uint32_t dio_offset_align;
  unsigned char rest[0x60];
};
static_assert(sizeof(KernelStatx) == 256);

}  // namespace

std::optional<Alignment> direct_alignment(int fd) {
  // tmpfs accepts O_DIRECT and ignores it: there is no drive. (The node of a block device lies on one, too.)
  struct stat status {};
  struct statfs fs {};
  if (::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && ::fstatfs(fd, &fs) == 0 &&
      (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC)) {
    return std::nullopt;
  }
  KernelStatx found{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, reinterpret_cast<struct statx*>(&found)) != 0 ||
      !(found.mask & STATX_DIOALIGN)) {
    return Alignment{};
  }
  if (found.dio_offset_align == 0) return std::nullopt;
  return Alignment{found.dio_mem_align, found.dio_offset_align};
}

}  // namespace deepnvme

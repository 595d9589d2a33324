#include "contiguous_memory.hpp"

#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "aligned_memory.hpp"
#include "unique_fd.hpp"

namespace deepnvme {
namespace {

// A ring may have one region of memory that the kernel allocates, all in one piece if it can, for the process to map.
// It is meant for arguments of system calls; to the drive it is memory like any other. Not in older headers.
constexpr unsigned kRegisterMemRegion = 34;
struct RegionDescription {
  uint64_t user_address;
  uint64_t nbytes;
  uint32_t flags;  // 0: the kernel allocates
  uint32_t id;
  uint64_t mmap_offset;  // set by the kernel
  uint64_t reserved[4];
};
struct RegionRegistration {
  uint64_t description;
  uint64_t flags;
  uint64_t reserved[2];
};

}  // namespace

Mapping map_contiguous(size_t nbytes) {
  io_uring_params params{};
  const UniqueFd ring(static_cast<int>(::syscall(SYS_io_uring_setup, 1, &params)));
  if (!ring) return {};
  RegionDescription region{};
  region.nbytes = round_up(nbytes, kPage);
  RegionRegistration registration{};
  registration.description = reinterpret_cast<uintptr_t>(&region);
  if (::syscall(SYS_io_uring_register, ring.get(), kRegisterMemRegion, &registration, 1) != 0) return {};
  // The mapping keeps the ring, and with it the region, until it is unmapped. The kernel takes no address for it.
  const auto offset = static_cast<off_t>(region.mmap_offset);
  constexpr int kFlags = MAP_SHARED | MAP_POPULATE;
  return Mapping(::mmap(nullptr, region.nbytes, PROT_READ | PROT_WRITE, kFlags, ring.get(), offset), region.nbytes);
}

}  // namespace deepnvme

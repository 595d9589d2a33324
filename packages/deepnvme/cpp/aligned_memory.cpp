#include "aligned_memory.hpp"

#include <cerrno>
#include <cstdint>
#include <string>

#include "io_error.hpp"

namespace deepnvme {

AlignedMemory::AlignedMemory(size_t nbytes) : nbytes_(nbytes) {
  // The drive takes one segment a page, and only some hundred segments a request: on scattered 4 KiB pages a
  // block is cut into small commands and the drive runs at a third of its rate. Hence huge pages.
  const bool big = nbytes >= kHugePage;
  const size_t unit = big ? kHugePage : kPage;
  // mmap aligns to 4 KiB only, so one unit more is mapped and the start rounded up. Untouched pages cost nothing.
  const size_t mapped = round_up(nbytes ? nbytes : 1, unit) + (big ? unit : 0);
  mapping_ = Mapping(
      ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), mapped);
  if (!mapping_) throw SystemError(errno, "cannot map " + std::to_string(nbytes) + " bytes of host memory");
  data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(mapping_.data()), unit));
  huge_pages_ = big && ::madvise(data_, round_up(nbytes, unit), MADV_HUGEPAGE) == 0;
}

int AlignedMemory::lock() const { return ::mlock(data_, nbytes_) == 0 ? 0 : errno; }

}  // namespace deepnvme

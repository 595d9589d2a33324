#include "aligned_memory.hpp"

#include <fcntl.h>
#include <sys/prctl.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "contiguous_memory.hpp"
#include "io_error.hpp"
#include "unique_fd.hpp"

namespace deepnvme {

bool huge_pages_allowed() {
  if (::prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1) return false;
  const UniqueFd setting(::open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY | O_CLOEXEC));
  char text[64];
  const ssize_t length = setting ? ::read(setting.get(), text, sizeof text) : 0;
  return length > 0 && std::string_view(text, static_cast<size_t>(length)).find("[never]") == std::string_view::npos;
}

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
  huge_pages_ = big && huge_pages_allowed() && ::madvise(data_, round_up(nbytes, unit), MADV_HUGEPAGE) == 0;
}

AlignedMemory AlignedMemory::contiguous_if_possible(size_t nbytes) {
  Mapping mapping = map_contiguous(nbytes);
  if (!mapping) return AlignedMemory(nbytes);
  AlignedMemory memory;
  memory.data_ = mapping.data();
  memory.mapping_ = std::move(mapping);
  memory.nbytes_ = nbytes;
  memory.contiguous_ = true;
  return memory;
}

int AlignedMemory::lock() const { return ::mlock(data_, nbytes_) == 0 ? 0 : errno; }

}  // namespace deepnvme

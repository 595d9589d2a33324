#include "file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace deepnvme {
namespace {

// Below this an extending write is left to extend by itself: reserving costs more than it gains.
constexpr size_t kWorthReserving = 256 << 10;

bool all_direct(const std::vector<FileMember>& members) {
  return std::all_of(members.begin(), members.end(), [](const FileMember& m) { return bool(m.direct); });
}

int fallocate_range(int fd, uint64_t begin, uint64_t end) {
  while (::fallocate(fd, 0, static_cast<off_t>(begin), static_cast<off_t>(end - begin)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

// Whether fallocate's errno means that this filesystem cannot reserve, as opposed to: there is no room.
bool cannot_reserve(int code) {
  return code == EOPNOTSUPP || code == ENOSYS || code == EINVAL || code == ENODEV || code == ESPIPE || code == EPERM;
}

// The nearest to a reservation where there is none: check that the room is there now, then set the length.
int grow_sparse(int fd, uint64_t nbytes, uint64_t present) {
  struct statvfs fs {};
  if (::fstatvfs(fd, &fs) == 0 && nbytes > present && fs.f_bavail * fs.f_frsize < nbytes - present) return ENOSPC;
  return ::ftruncate(fd, static_cast<off_t>(nbytes)) == 0 ? 0 : errno;
}

}  // namespace

File::File(std::vector<FileMember> members, uint64_t stripe, Alignment alignment)
    : members_(std::move(members)), stripe_(stripe), alignment_(alignment), direct_(all_direct(members_)) {
  struct stat status {};
  const bool regular = ::fstat(members_.front().cached.get(), &status) == 0 && S_ISREG(status.st_mode);
  extendable_ = regular && members_.size() == 1;
  known_nbytes_ = extendable_ ? static_cast<uint64_t>(status.st_size) : 0;
}

std::string File::path() const {
  std::string all;
  for (const FileMember& m : members_) all += (all.empty() ? "" : ", ") + m.path;
  return all;
}

IoError File::reserve(uint64_t nbytes) {
  for (unsigned i = 0; i < members_.size(); ++i) {
    const uint64_t share = member_nbytes(nbytes, i, static_cast<unsigned>(members_.size()), stripe_);
    if (share == 0) continue;
    const int fd = members_[i].cached.get();
    int code = fallocate_range(fd, 0, share);
    if (cannot_reserve(code)) {
      struct stat status {};
      if (::fstat(fd, &status) != 0) {
        code = errno;
      } else if (static_cast<uint64_t>(status.st_size) >= share) {
        code = 0;
      } else {
        code = grow_sparse(fd, share, static_cast<uint64_t>(status.st_blocks) * 512);
      }
    }
    if (code) return {code, "reserve", members_[i].path, 0, static_cast<size_t>(share), 0, ""};
  }
  if (extendable_) known_nbytes_ = std::max<uint64_t>(known_nbytes_, nbytes);
  return {};
}

IoError File::prepare_write(uint64_t offset, size_t nbytes) {
  if (!extendable_) return {};
  const uint64_t end = offset + nbytes;
  const uint64_t known = known_nbytes_.load(std::memory_order_relaxed);
  if (end <= known) return {};
  const int fd = members_.front().cached.get();
  if (nbytes == 0) {
    // No byte will be written that could lengthen the file, and its length must be `offset` all the same.
    struct stat status {};
    if (::fstat(fd, &status) == 0 && static_cast<uint64_t>(status.st_size) < end &&
        ::ftruncate(fd, static_cast<off_t>(end)) != 0) {
      return {errno, "write", path(), offset, nbytes, 0, ""};
    }
  } else if (end - std::max(known, offset) >= kWorthReserving) {
    const int code = fallocate_range(fd, std::max(known, offset), end);
    if (code && !cannot_reserve(code)) return {code, "write", path(), offset, nbytes, 0, ""};
    if (code) return {};
  } else {
    return {};  // known_nbytes_ stays: the write itself may fail
  }
  uint64_t seen = known;
  while (seen < end && !known_nbytes_.compare_exchange_weak(seen, end, std::memory_order_relaxed)) {
  }
  return {};
}

IoError File::sync() const {
  for (const FileMember& m : members_) {
    while (::fdatasync(m.cached.get()) != 0) {
      if (errno == EINTR) continue;
      // A device such as /dev/full has nothing to make durable.
      if (errno == EINVAL || errno == EROFS) break;
      return {errno, "sync", m.path, 0, 0, 0, ""};
    }
  }
  return {};
}

}  // namespace deepnvme

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

int fallocate_range(int fd, int mode, uint64_t begin, uint64_t end) {
  while (::fallocate(fd, mode, static_cast<off_t>(begin), static_cast<off_t>(end - begin)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

// The file's length comes last: where there is no room it stays, and nobody reads zeros that were never written.
int reserve_range(int fd, uint64_t begin, uint64_t end) {
  const int code = end - begin > 1 ? fallocate_range(fd, FALLOC_FL_KEEP_SIZE, begin, end) : 0;
  return code ? code : fallocate_range(fd, 0, end - 1, end);
}

// Whether fallocate's errno means that this filesystem cannot reserve, as opposed to: there is no room.
bool cannot_reserve(int code) {
  return code == EOPNOTSUPP || code == ENOSYS || code == EINVAL || code == ENODEV || code == ESPIPE || code == EPERM;
}

// `otherwise` where it cannot be found out.
uint64_t length_of(int fd, uint64_t otherwise) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 ? static_cast<uint64_t>(status.st_size) : otherwise;
}

// Only where a filesystem cannot reserve.
int lengthen(int fd, uint64_t nbytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return errno;
  if (static_cast<uint64_t>(status.st_size) >= nbytes) return 0;
  return ::ftruncate(fd, static_cast<off_t>(nbytes)) == 0 ? 0 : errno;
}

// What a reservation that failed has got of the drive goes back, unless somebody else has written behind it meanwhile.
void give_back(int fd, uint64_t nbytes_before, uint64_t nbytes_wanted) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return;
  const auto nbytes = static_cast<uint64_t>(status.st_size);
  if (nbytes >= nbytes_before && nbytes <= nbytes_wanted) (void)!::ftruncate(fd, static_cast<off_t>(nbytes_before));
}

// The nearest to a reservation where there is none: check that the room is there now, then set the length.
int grow_sparse(int fd, uint64_t nbytes, uint64_t present) {
  struct statvfs fs {};
  if (::fstatvfs(fd, &fs) == 0 && nbytes > present && fs.f_bavail * fs.f_frsize < nbytes - present) return ENOSPC;
  return lengthen(fd, nbytes);
}

}  // namespace

File::File(std::vector<FileMember> members, uint64_t stripe, Alignment alignment)
    : members_(std::move(members)), stripe_(stripe), alignment_(alignment), direct_(all_direct(members_)) {
  struct stat status {};
  extendable_ = ::fstat(members_.front().cached.get(), &status) == 0 && S_ISREG(status.st_mode);
  known_nbytes_ = extendable_ && members_.size() == 1 ? static_cast<uint64_t>(status.st_size) : 0;
}

std::string File::path() const {
  std::string all;
  for (const FileMember& m : members_) all += (all.empty() ? "" : ", ") + m.path;
  return all;
}

IoError File::reserve(uint64_t nbytes) {
  std::vector<uint64_t> before;
  const auto share_of = [&](unsigned i) {
    return member_nbytes(nbytes, i, static_cast<unsigned>(members_.size()), stripe_);
  };
  for (unsigned i = 0; i < members_.size(); ++i) {
    const uint64_t share = share_of(i);
    const int fd = members_[i].cached.get();
    before.push_back(length_of(fd, share));
    if (share == 0) continue;
    int code = reserve_range(fd, 0, share);
    if (cannot_reserve(code)) {
      struct stat status {};
      code = ::fstat(fd, &status) == 0 ? grow_sparse(fd, share, static_cast<uint64_t>(status.st_blocks) * 512) : errno;
    }
    if (code) {
      for (unsigned j = 0; j <= i; ++j) give_back(members_[j].cached.get(), before[j], share_of(j));
      return {code, "reserve", members_[i].path, 0, static_cast<size_t>(share), 0, ""};
    }
  }
  if (extendable_) known_nbytes_ = std::max<uint64_t>(known_nbytes_, nbytes);
  return {};
}

IoError File::prepare_write(uint64_t offset, size_t nbytes) {
  if (!extendable_) return {};
  const uint64_t end = offset + nbytes;
  const uint64_t known = known_nbytes_.load(std::memory_order_relaxed);
  if (end <= known) return {};
  const std::lock_guard lock(growing_);
  const uint64_t promised_to_others = promised_nbytes_;
  promised_nbytes_ = std::max(promised_nbytes_, end);
  const unsigned count = static_cast<unsigned>(members_.size());
  const bool large = end - std::max(known, offset) >= kWorthReserving;
  // One byte at least is written to a plain file, and that lengthens it. A striped one is lengthened here, since the
  // members that this write does not reach must grow as well; so is a plain one by an empty write.
  if (count == 1 && nbytes > 0 && !large) return {};
  // Of each member, where the reservation fails: what others write there meanwhile stays.
  std::vector<uint64_t> before;
  const auto length_to_keep = [&](unsigned i, uint64_t share) {
    return std::max(length_of(members_[i].cached.get(), share), member_nbytes(promised_to_others, i, count, stripe_));
  };
  for (unsigned i = 0; i < count; ++i) {
    const uint64_t share = member_nbytes(end, i, count, stripe_);
    before.push_back(length_to_keep(i, share));
    const uint64_t share_before = std::max(member_nbytes(known, i, count, stripe_), member_nbytes(offset, i, count, stripe_));
    if (share <= member_nbytes(known, i, count, stripe_)) continue;
    // Reserving the last byte alone lengthens the file too. ftruncate would do it without taking a block, but could
    // cut off what another request has written behind it meanwhile.
    const uint64_t begin = large ? std::min(share_before, share - 1) : share - 1;
    const int fd = members_[i].cached.get();
    int code = reserve_range(fd, begin, share);
    if (cannot_reserve(code)) {
      // Then only ftruncate remains. It cuts off what was written behind its end since it looked: never where the
      // write lengthens the file by itself, and never to less than all requests have been promised.
      if (count == 1 && nbytes > 0) return {};
      code = lengthen(fd, member_nbytes(promised_nbytes_, i, count, stripe_));
    }
    if (code) {
      before[i] = length_to_keep(i, share);  // this one is as long as it was, or as others have made it
      for (unsigned j = 0; j <= i; ++j) give_back(members_[j].cached.get(), before[j], member_nbytes(end, j, count, stripe_));
      promised_nbytes_ = promised_to_others;
      return {code, "write", members_[i].path, offset, nbytes, 0, ""};
    }
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

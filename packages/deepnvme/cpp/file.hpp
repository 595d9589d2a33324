// The descriptors of one file, or of the members of a striped one, and what O_DIRECT asks of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "io_error.hpp"
#include "transfer.hpp"
#include "unique_fd.hpp"

namespace deepnvme {

struct FileMember {
  UniqueFd cached;  // always there
  UniqueFd direct;  // with O_DIRECT, or none
  std::string path;
};

// Requests share it, so its descriptors close when the last request that uses them has ended.
class File {
 public:
  // Takes over the descriptors. `stripe` matters with several members only.
  File(std::vector<FileMember> members, uint64_t stripe, Alignment alignment);

  const std::vector<FileMember>& members() const { return members_; }
  uint64_t stripe() const { return stripe_; }
  const Alignment& alignment() const { return alignment_; }
  bool direct() const { return direct_; }
  std::string path() const;  // of all members, for messages

  int fd(unsigned member, Route route) const {
    const FileMember& m = members_[member];
    return route == Route::cached ? m.cached.get() : m.direct.get();
  }

  // Reserves [0, nbytes) on the drive; the file grows to that length. Throws nothing: returns what failed.
  IoError reserve(uint64_t nbytes);

  // Ahead of a write that makes the file longer: reserves the new part, so that the pieces may be written side by
  // side (extending writes go one by one in the kernel) and a full drive says so at once.
  IoError prepare_write(uint64_t offset, size_t nbytes);

  // fdatasync of every member.
  IoError sync() const;

 private:
  std::vector<FileMember> members_;
  uint64_t stripe_;
  Alignment alignment_;
  bool direct_;
  bool extendable_;                     // regular files, no devices
  std::atomic<uint64_t> known_nbytes_;  // a lower bound of the length, unless someone else truncates it
  std::mutex growing_;                  // one request at a time makes the file longer, and guards:
  uint64_t promised_nbytes_ = 0;        // how long the requests so far make it, also those under way
};

}  // namespace deepnvme

// What a backend offers: queue, commit, reap; and how it can be woken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transfer.hpp"

namespace deepnvme {

// One system call's worth of I/O. `token` comes back with its outcome.
struct Submission {
  Direction direction;
  int fd;
  std::byte* address;
  size_t nbytes;
  uint64_t offset;
  uint32_t token;
};

struct Outcome {
  uint32_t token;
  int64_t result;  // bytes moved, or -errno
};

// Used by one thread, its worker; only wake() may be called by others.
class Backend {
 public:
  virtual ~Backend() = default;

  // Accepts a submission without starting it. False: busy, commit or reap first.
  virtual bool queue(const Submission& submission) = 0;
  // Starts all that was queued. With `wait`, returns when an outcome can be reaped, or someone called wake(), or
  // for no reason at all.
  virtual void commit(bool wait) = 0;
  // Appends the outcomes that are there; never blocks.
  virtual void reap(std::vector<Outcome>& outcomes) = 0;
  // Ends a commit(wait = true), the present one or the next.
  virtual void wake() = 0;
};

struct BackendSettings {
  unsigned depth = 32;   // outcomes that may be pending at once
  unsigned threads = 4;  // of the threads backend
};

struct BackendKind {
  const char* name;
  // Throws SystemError when it cannot run here, or not with these settings.
  std::unique_ptr<Backend> (*make_plain)(const BackendSettings&);

  // The same; the SystemError also says in words what would help.
  std::unique_ptr<Backend> make(const BackendSettings& settings) const;
};

// Best first.
const std::vector<BackendKind>& backend_kinds();
// Throws SystemError(EINVAL) for an unknown name.
const BackendKind& backend_kind(const std::string& name);

std::unique_ptr<Backend> make_io_uring_backend(const BackendSettings& settings);
std::unique_ptr<Backend> make_libaio_backend(const BackendSettings& settings);
std::unique_ptr<Backend> make_thread_backend(const BackendSettings& settings);

}  // namespace deepnvme

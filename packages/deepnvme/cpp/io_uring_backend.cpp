// Engine "io_uring": a plain ring, everything pending in one io_uring_enter.
//
// No registered buffers, no polling thread, no second ring by default: none of them was faster on a drive that one
// thread fills, registered buffers count against an ordinary user's RLIMIT_MEMLOCK, and SQPOLL burns a core.

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <ctime>

#include "backend.hpp"
#include "io_error.hpp"
#include "ring.hpp"

namespace deepnvme {
namespace {

constexpr uint64_t kWake = UINT64_MAX;
// Ring memory counts as locked memory on older kernels, for all of a user's processes together; 256 entries are 16
// KiB and already more than fits into one useful batch.
constexpr unsigned kMostEntries = 256;

class IoUringBackend : public Backend {
 public:
  explicit IoUringBackend(unsigned depth)
      : ring_(std::min(std::bit_ceil(depth + 1), kMostEntries), std::bit_ceil(depth + 2)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) throw SystemError(errno, "eventfd failed");
    if (!ring_.supports(IORING_OP_READ)) throw SystemError(ENOSYS, "this kernel's io_uring is too old (before 5.6)");
    go_round_once();
  }

  bool queue(const Submission& s) override {
    io_uring_sqe* sqe = ring_.get_sqe();
    if (!sqe) return false;
    sqe->opcode = s.direction == Direction::read ? IORING_OP_READ : IORING_OP_WRITE;
    sqe->fd = s.fd;
    sqe->addr = reinterpret_cast<uint64_t>(s.address);
    sqe->len = static_cast<uint32_t>(s.nbytes);
    sqe->off = s.offset;
    sqe->user_data = s.token;
    return true;
  }

  void commit(bool wait) override {
    if (wait && !listening_) listen();
    // Completions that are there already make waiting wrong; an error here means nothing was waited for.
    const bool sleep = wait && !ring_.has_completion() && failed_.empty();
    if (!sleep && ring_.unsubmitted() == 0) return;
    const int code = ring_.submit(sleep ? 1 : 0);
    if (code == 0 || code == EINTR) return;
    if (code == EAGAIN || code == EBUSY || code == ENOMEM) {
      // The kernel is out of request memory or completion room: come back when something has been reaped.
      if (!ring_.has_completion()) pause();
      return;
    }
    // The kernel refuses the ring itself (forbidden since, or out of order). What it did not take has failed.
    for (uint64_t token : ring_.withdraw()) {
      if (token == kWake) {
        listening_ = false;
      } else {
        failed_.push_back({static_cast<uint32_t>(token), -code});
      }
    }
    if (failed_.empty()) pause();
  }

  void reap(std::vector<Outcome>& outcomes) override {
    outcomes.insert(outcomes.end(), failed_.begin(), failed_.end());
    failed_.clear();
    io_uring_cqe cqe;
    while (ring_.reap(cqe)) {
      if (cqe.user_data == kWake) {
        listening_ = false;
        uint64_t count;
        // Non-blocking; whether it was set does not matter, being awake does.
        [[maybe_unused]] const ssize_t n = ::read(wake_.get(), &count, sizeof count);
      } else {
        outcomes.push_back({static_cast<uint32_t>(cqe.user_data), cqe.res});
      }
    }
  }

  void wake() override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
  }

 private:
  // A ring can be made and yet be of no use, where only io_uring_enter is forbidden.
  void go_round_once() {
    io_uring_sqe* sqe = ring_.get_sqe();
    sqe->opcode = IORING_OP_NOP;
    int code = 0;
    while ((code = ring_.submit(1)) == EINTR) {
    }
    if (code) throw SystemError(code, "io_uring_enter failed");
    io_uring_cqe cqe;
    while (!ring_.reap(cqe)) {
    }
  }

  // Makes the eventfd complete in the ring, so that one system call waits for I/O and for new requests.
  void listen() {
    io_uring_sqe* sqe = ring_.get_sqe();
    if (!sqe) return;  // full of I/O, whose completion wakes us as well
    sqe->opcode = IORING_OP_POLL_ADD;
    sqe->fd = wake_.get();
    sqe->poll_events = POLLIN;
    sqe->user_data = kWake;
    listening_ = true;
  }

  static void pause() {
    const timespec millisecond{0, 1'000'000};
    ::nanosleep(&millisecond, nullptr);
  }

  Ring ring_;
  UniqueFd wake_;
  bool listening_ = false;
  std::vector<Outcome> failed_;
};

}  // namespace

std::unique_ptr<Backend> make_io_uring_backend(const BackendSettings& settings) {
  return std::make_unique<IoUringBackend>(settings.depth);
}

}  // namespace deepnvme

// Engine "libaio": the kernel's older asynchronous I/O, through its system calls (no library of that name is used).
//
// It is truly asynchronous with O_DIRECT only; through the page cache io_submit does the work itself. Containers that
// forbid io_uring mostly allow it.

#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "backend.hpp"
#include "blocking_io.hpp"
#include "io_error.hpp"
#include "unique_fd.hpp"

namespace deepnvme {
namespace {

class AioContext {
 public:
  explicit AioContext(unsigned events) {
    if (::syscall(SYS_io_setup, events, &id_) != 0) throw SystemError(errno, "io_setup failed");
  }
  AioContext(const AioContext&) = delete;
  AioContext& operator=(const AioContext&) = delete;
  ~AioContext() { ::syscall(SYS_io_destroy, id_); }
  aio_context_t id() const { return id_; }

 private:
  aio_context_t id_ = 0;
};

std::string first_word(const char* path) {
  std::ifstream in(path);
  std::string word;
  in >> word;
  return word.empty() ? "unknown" : word;
}

// io_setup answers EAGAIN when the events of all contexts on the machine would pass fs.aio-max-nr.
AioContext make_context(unsigned depth) try {
  return AioContext(depth);
} catch (const SystemError& e) {
  if (e.code() != EAGAIN) throw;
  throw SystemError(EAGAIN, "io_setup for queue_depth " + std::to_string(depth) +
                                " failed (all processes together may have fs.aio-max-nr = " +
                                first_word("/proc/sys/fs/aio-max-nr") + " events and hold " +
                                first_word("/proc/sys/fs/aio-nr") + ")");
}

class LibaioBackend : public Backend {
 public:
  explicit LibaioBackend(unsigned depth)
      : context_(make_context(depth)), done_(::eventfd(0, EFD_CLOEXEC)), blocks_(depth), events_(depth) {
    if (!done_) throw SystemError(errno, "eventfd failed");
    for (iocb& block : blocks_) free_.push_back(&block);
  }

  bool queue(const Submission& s) override {
    if (free_.empty()) return false;
    iocb* block = free_.back();
    free_.pop_back();
    std::memset(block, 0, sizeof *block);
    block->aio_data = s.token;
    block->aio_lio_opcode = s.direction == Direction::read ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
    block->aio_fildes = static_cast<uint32_t>(s.fd);
    block->aio_buf = reinterpret_cast<uint64_t>(s.address);
    block->aio_nbytes = s.nbytes;
    block->aio_offset = static_cast<int64_t>(s.offset);
    // The same eventfd tells of completions and of wake(), so one read waits for both.
    block->aio_flags = IOCB_FLAG_RESFD;
    block->aio_resfd = static_cast<uint32_t>(done_.get());
    queued_.push_back(block);
    return true;
  }

  void commit(bool wait) override {
    submit_queued();
    if (!wait || !refused_.empty()) return;  // an outcome is there already
    uint64_t count;
    [[maybe_unused]] const ssize_t n = ::read(done_.get(), &count, sizeof count);
  }

  void reap(std::vector<Outcome>& outcomes) override {
    outcomes.insert(outcomes.end(), refused_.begin(), refused_.end());
    refused_.clear();
    while (started_ > 0) {
      timespec now{};
      const long n = ::syscall(SYS_io_getevents, context_.id(), 0L, static_cast<long>(events_.size()), events_.data(), &now);
      if (n <= 0) break;
      for (long i = 0; i < n; ++i) {
        outcomes.push_back({static_cast<uint32_t>(events_[i].data), events_[i].res});
        free_.push_back(reinterpret_cast<iocb*>(events_[i].obj));
      }
      started_ -= static_cast<size_t>(n);
    }
  }

  void wake() override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(done_.get(), &one, sizeof one);
  }

 private:
  void submit_queued() {
    size_t sent = 0;
    while (sent < queued_.size()) {
      const long n = ::syscall(SYS_io_submit, context_.id(), static_cast<long>(queued_.size() - sent), queued_.data() + sent);
      if (n > 0) {
        sent += static_cast<size_t>(n);
        started_ += static_cast<size_t>(n);
        continue;
      }
      const int code = errno;
      if (code == EINTR) continue;
      if (code == EAGAIN && started_ > 0) break;  // out of kernel requests: some will come back
      // io_submit stops at the first bad one: that one has an outcome already.
      const iocb& bad = *queued_[sent];
      // EINVAL also means a file without asynchronous methods (a character device), which blocking calls can do.
      refused_.push_back({static_cast<uint32_t>(bad.aio_data), code == EINVAL ? move_blocking(submission_of(bad)) : -code});
      free_.push_back(queued_[sent]);
      ++sent;
    }
    queued_.erase(queued_.begin(), queued_.begin() + static_cast<ptrdiff_t>(sent));
  }

  static Submission submission_of(const iocb& block) {
    return {block.aio_lio_opcode == IOCB_CMD_PREAD ? Direction::read : Direction::write,
            static_cast<int>(block.aio_fildes),
            reinterpret_cast<std::byte*>(block.aio_buf),
            static_cast<size_t>(block.aio_nbytes),
            static_cast<uint64_t>(block.aio_offset),
            static_cast<uint32_t>(block.aio_data)};
  }

  AioContext context_;
  UniqueFd done_;
  std::vector<iocb> blocks_;
  std::vector<io_event> events_;
  std::vector<iocb*> free_;
  std::vector<iocb*> queued_;
  std::vector<Outcome> refused_;  // by io_submit
  size_t started_ = 0;  // with the kernel
};

}  // namespace

std::unique_ptr<Backend> make_libaio_backend(const BackendSettings& settings) {
  return std::make_unique<LibaioBackend>(settings.depth);
}

}  // namespace deepnvme

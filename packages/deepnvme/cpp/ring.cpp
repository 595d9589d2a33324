#include "ring.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "io_error.hpp"

namespace deepnvme {
namespace {

// The kernel writes its head before it looks at the entry no more, and its tail after the completion is written:
// reading either acquires. Our own head and tail release what we did with the entries before.
unsigned load_acquire(unsigned* shared) { return std::atomic_ref<unsigned>(*shared).load(std::memory_order_acquire); }
void store_release(unsigned* shared, unsigned value) {
  std::atomic_ref<unsigned>(*shared).store(value, std::memory_order_release);
}

Mapping map_ring(int fd, size_t nbytes, off_t what) {
  Mapping mapping(::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what), nbytes);
  if (!mapping) throw SystemError(errno, "mmap of an io_uring failed");
  return mapping;
}

}  // namespace

Ring::Ring(unsigned entries, unsigned completions) {
  io_uring_params params{};
  params.flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP;
  params.cq_entries = completions;
  fd_ = UniqueFd(static_cast<int>(::syscall(SYS_io_uring_setup, entries, &params)));
  if (!fd_) throw SystemError(errno, "io_uring_setup failed");

  size_t sq_nbytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  const size_t cq_nbytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  const bool single = params.features & IORING_FEAT_SINGLE_MMAP;
  if (single && cq_nbytes > sq_nbytes) sq_nbytes = cq_nbytes;
  sq_ring_ = map_ring(fd_.get(), sq_nbytes, IORING_OFF_SQ_RING);
  if (!single) cq_ring_ = map_ring(fd_.get(), cq_nbytes, IORING_OFF_CQ_RING);
  sqe_array_ = map_ring(fd_.get(), params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
  const Mapping& cq = single ? sq_ring_ : cq_ring_;

  sq_khead_ = sq_ring_.at<unsigned>(params.sq_off.head);
  sq_ktail_ = sq_ring_.at<unsigned>(params.sq_off.tail);
  sq_mask_ = *sq_ring_.at<unsigned>(params.sq_off.ring_mask);
  sq_entries_ = params.sq_entries;
  cq_khead_ = cq.at<unsigned>(params.cq_off.head);
  cq_ktail_ = cq.at<unsigned>(params.cq_off.tail);
  cq_mask_ = *cq.at<unsigned>(params.cq_off.ring_mask);
  cqes_ = cq.at<io_uring_cqe>(params.cq_off.cqes);
  sqes_ = sqe_array_.at<io_uring_sqe>(0);
  // Entry i is always described by slot i of the indirection array, which thus never changes again.
  unsigned* array = sq_ring_.at<unsigned>(params.sq_off.array);
  for (unsigned i = 0; i < params.sq_entries; ++i) array[i] = i;
}

io_uring_sqe* Ring::get_sqe() {
  if (tail_ - head_seen_ == sq_entries_) {
    head_seen_ = load_acquire(sq_khead_);
    if (tail_ - head_seen_ == sq_entries_) return nullptr;
  }
  io_uring_sqe* sqe = &sqes_[tail_++ & sq_mask_];
  std::memset(sqe, 0, sizeof *sqe);
  return sqe;
}

int Ring::submit(unsigned wait_for) {
  store_release(sq_ktail_, tail_);
  const unsigned flags = wait_for ? IORING_ENTER_GETEVENTS : 0;
  const long taken = ::syscall(SYS_io_uring_enter, fd_.get(), unsubmitted(), wait_for, flags, nullptr, 0);
  const int code = taken < 0 ? errno : 0;
  head_seen_ = load_acquire(sq_khead_);
  return code;
}

std::vector<uint64_t> Ring::withdraw() {
  // Without a polling kernel thread the kernel reads the queue in io_uring_enter only, so what it did not take there
  // is ours again.
  head_seen_ = load_acquire(sq_khead_);
  std::vector<uint64_t> taken_back;
  for (unsigned i = head_seen_; i != tail_; ++i) taken_back.push_back(sqes_[i & sq_mask_].user_data);
  tail_ = head_seen_;
  store_release(sq_ktail_, tail_);
  return taken_back;
}

bool Ring::has_completion() const { return *cq_khead_ != load_acquire(cq_ktail_); }

bool Ring::reap(io_uring_cqe& completion) {
  const unsigned head = *cq_khead_;  // written by us alone
  if (head == load_acquire(cq_ktail_)) return false;
  std::memcpy(&completion, &cqes_[head & cq_mask_], sizeof completion);
  store_release(cq_khead_, head + 1);
  return true;
}

bool Ring::supports(unsigned opcode) const {
  constexpr unsigned kOps = 256;
  std::vector<unsigned char> room(sizeof(io_uring_probe) + kOps * sizeof(io_uring_probe_op));
  auto* probe = reinterpret_cast<io_uring_probe*>(room.data());
  if (::syscall(SYS_io_uring_register, fd_.get(), IORING_REGISTER_PROBE, probe, kOps) < 0) return false;
  return opcode < probe->ops_len && probe->ops[opcode].flags & IO_URING_OP_SUPPORTED;
}

}  // namespace deepnvme

// One io_uring: set-up, get_sqe, submit, reap. All memory ordering between us and the kernel is in ring.cpp.
#pragma once

#include <linux/io_uring.h>

#include <cstdint>
#include <vector>

#include "mapping.hpp"
#include "unique_fd.hpp"

namespace deepnvme {

class Ring {
 public:
  // `entries`: how many submissions fit between two submit(); `completions`: how many may wait to be reaped.
  // Throws SystemError with the errno of io_uring_setup or mmap.
  Ring(unsigned entries, unsigned completions);

  // A zeroed entry to fill in, or nullptr while the submission queue is full.
  io_uring_sqe* get_sqe();
  // Entries filled in and not yet taken by the kernel.
  unsigned unsubmitted() const { return tail_ - head_seen_; }
  // Hands them over and, in the same system call, waits for `wait_for` completions. Returns 0 or an errno (EINTR,
  // EAGAIN and EBUSY: try again after reaping).
  int submit(unsigned wait_for);
  // Takes the unsubmitted entries back and returns their user_data.
  std::vector<uint64_t> withdraw();

  bool has_completion() const;
  // The oldest completion, if there is one.
  bool reap(io_uring_cqe& completion);

  // Whether the kernel knows this operation.
  bool supports(unsigned opcode) const;

 private:
  UniqueFd fd_;
  Mapping sq_ring_, cq_ring_, sqe_array_;
  // Into sq_ring_
  unsigned* sq_khead_;
  unsigned* sq_ktail_;
  unsigned sq_mask_;
  unsigned sq_entries_;
  // Into cq_ring_, which is sq_ring_ on kernels with IORING_FEAT_SINGLE_MMAP
  unsigned* cq_khead_;
  unsigned* cq_ktail_;
  unsigned cq_mask_;
  io_uring_cqe* cqes_;
  io_uring_sqe* sqes_;

  unsigned tail_ = 0;       // ours; published to the kernel by submit()
  unsigned head_seen_ = 0;  // how far the kernel had got
};

}  // namespace deepnvme

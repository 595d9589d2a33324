// The ring itself: filling up, submitting, reaping, taking back. Skipped where the kernel has no io_uring.

#include "ring.hpp"

#include <cstdio>
#include <set>

#include "check.hpp"
#include "io_error.hpp"

using namespace deepnvme;

namespace {

void queue_nop(Ring& ring, uint64_t user_data) {
  io_uring_sqe* sqe = ring.get_sqe();
  CHECK(sqe);
  sqe->opcode = IORING_OP_NOP;
  sqe->user_data = user_data;
}

void test_many_times_around() {
  Ring ring(4, 8);
  io_uring_cqe cqe;
  CHECK(!ring.has_completion() && !ring.reap(cqe));
  uint64_t next = 0;
  for (int round = 0; round < 10'000; ++round) {
    const unsigned batch = 1 + round % 4;
    for (unsigned i = 0; i < batch; ++i) queue_nop(ring, next + i);
    CHECK(ring.unsubmitted() == batch);
    if (batch == 4) CHECK(ring.get_sqe() == nullptr);  // full is an answer
    CHECK(ring.submit(batch) == 0);
    CHECK(ring.unsubmitted() == 0);
    std::set<uint64_t> seen;
    while (ring.reap(cqe)) CHECK(cqe.res == 0 && seen.insert(cqe.user_data).second);
    CHECK(seen.size() == batch && *seen.begin() == next && *seen.rbegin() == next + batch - 1);
    next += batch;
  }
}

void test_withdrawn_entries_never_run() {
  Ring ring(8, 16);
  for (uint64_t i = 0; i < 5; ++i) queue_nop(ring, i);
  CHECK((ring.withdraw() == std::vector<uint64_t>{0, 1, 2, 3, 4}));
  queue_nop(ring, 77);
  CHECK(ring.submit(1) == 0);
  io_uring_cqe cqe;
  CHECK(ring.reap(cqe) && cqe.user_data == 77);
  CHECK(!ring.reap(cqe));
}

}  // namespace

int main() {
  try {
    Ring probe(1, 2);
    CHECK(probe.supports(IORING_OP_NOP));
    CHECK(!probe.supports(255));
  } catch (const SystemError& e) {
    std::printf("skipped: %s\n", e.what());
    return 0;
  }
  test_many_times_around();
  test_withdrawn_entries_never_run();
}

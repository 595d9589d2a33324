// A request ends once, with the first error, and lets go of those that wait for it.

#include "request.hpp"

#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "check.hpp"
#include "crc32c.hpp"

using namespace deepnvme;

namespace {

std::shared_ptr<Request> make_request(size_t nbytes, bool checksum = false) {
  Transfer transfer;
  transfer.nbytes = nbytes;
  return std::make_shared<Request>(1, nullptr, transfer, checksum);
}

void test_last_piece_ends_it() {
  auto request = make_request(100);
  Piece piece;
  piece.useful = 50;
  request->piece_issued();
  CHECK(!request->piece_done(piece, 0));  // not wholly issued
  request->piece_issued();
  CHECK(!request->issuing_done());
  CHECK(request->piece_done(piece, 0));
  CHECK(request->moved() == 100 && !request->failed());
}

void test_first_error_wins() {
  auto request = make_request(100);
  request->piece_issued();
  request->piece_issued();
  request->issuing_done();
  request->fail(EIO, "first");
  CHECK(!request->piece_lost());
  request->fail(ENOSPC, "second");
  CHECK(request->piece_lost());
  request->seal();
  CHECK(request->error().code == EIO && request->error().note == "first");
}

void test_checksum_in_any_order() {
  std::vector<unsigned char> data(10'000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 37 + i / 256);
  auto request = make_request(data.size(), true);
  const size_t cuts[] = {0, 1, 5000, 9999, 10'000};
  for (int i : {2, 0, 3, 1}) {
    Piece piece;
    piece.position = cuts[i];
    piece.useful = cuts[i + 1] - cuts[i];
    request->piece_issued();
    request->piece_done(piece, crc32c_raw(0, data.data() + piece.position, piece.useful));
  }
  CHECK(request->crc() == crc32c(0, data.data(), data.size()));
}

void test_dependents() {
  auto earlier = make_request(1), later = make_request(1), too_late = make_request(1);
  CHECK(earlier->add_dependent(later, true));
  earlier->fail(EIO);
  earlier->seal();
  const auto dependents = earlier->take_dependents();
  CHECK(dependents.size() == 1 && dependents[0].request == later && dependents[0].must_succeed);
  later->inherit_failure(*earlier);
  CHECK(later->failed() && later->error().code == EIO);
  CHECK(!earlier->add_dependent(too_late, false));
  CHECK(!earlier->want_notification());
}

void test_completion_wakes_all() {
  for (int round = 0; round < 200; ++round) {
    Completion completion;
    std::vector<std::thread> waiters;
    for (int i = 0; i < 4; ++i) {
      waiters.emplace_back([&] {
        while (!completion.wait_for(std::chrono::seconds(10))) {
        }
      });
    }
    completion.set();
    for (auto& t : waiters) t.join();
    CHECK(completion.is_set());
  }
  Completion never;
  CHECK(!never.wait_for(std::chrono::milliseconds(1)));
}

}  // namespace

int main() {
  test_last_piece_ends_it();
  test_first_error_wins();
  test_checksum_in_any_order();
  test_dependents();
  test_completion_wakes_all();
}

#include "request.hpp"

#include <utility>

#include "crc32c.hpp"

namespace deepnvme {

Request::Request(uint64_t id, std::shared_ptr<File> file, Transfer transfer, bool checksum)
    : id(id), transfer(transfer), checksum(checksum), file(std::move(file)) {}

bool Request::piece_done(const Piece& piece, uint32_t raw_crc) {
  moved_.fetch_add(piece.useful, std::memory_order_relaxed);
  if (checksum) {
    const size_t behind = transfer.nbytes - piece.position - piece.useful;
    raw_crc_.fetch_xor(crc32c_shift(raw_crc, behind), std::memory_order_relaxed);
  }
  return drop_one();
}

void Request::fail(int code, const char* note) {
  // Only the first failure is kept; later ones are mostly its consequences.
  if (failed_.exchange(true, std::memory_order_acq_rel)) return;
  error_.code = code;
  error_.operation = transfer.direction == Direction::read ? "read" : "write";
  if (file) error_.path = file->path();
  error_.offset = transfer.offset;
  error_.nbytes = transfer.nbytes;
  error_.note = note;
}

void Request::inherit_failure(const Request& earlier) {
  if (!earlier.failed() || failed_.exchange(true, std::memory_order_acq_rel)) return;
  error_ = earlier.error_;
}

bool Request::add_dependent(std::shared_ptr<Request> later, bool must_succeed) {
  std::lock_guard lock(links_);
  if (ended_) return false;
  dependents_.push_back({std::move(later), must_succeed});
  return true;
}

std::vector<Request::Dependent> Request::take_dependents() {
  std::lock_guard lock(links_);
  ended_ = true;
  return std::move(dependents_);
}

uint32_t Request::crc() const {
  return crc32c_finish(raw_crc_.load(std::memory_order_relaxed), transfer.nbytes);
}

void Request::seal() {
  if (failed()) error_.moved = moved();
  // A cancellation that came when every byte had been issued changed nothing.
  was_cancelled_ = cancelled && !failed() && moved() < transfer.nbytes;
  file.reset();
}

bool Request::want_notification() {
  std::lock_guard lock(links_);
  if (ended_) return false;
  notify_ = true;
  return true;
}

bool Request::notification_wanted() {
  std::lock_guard lock(links_);
  return notify_;
}

}  // namespace deepnvme

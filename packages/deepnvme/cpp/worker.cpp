#include "worker.hpp"

#include <cerrno>
#include <system_error>
#include <utility>

#include "block_copy.hpp"
#include "blocking_io.hpp"
#include "crc32c.hpp"
#include "io_error.hpp"

namespace deepnvme {
namespace {

// Bytes to copy or sum up before looking at the drive again: a fraction of what it takes the drive to run dry, and
// enough small pieces to make a batch.
constexpr size_t kBytesPerRound = 1 << 20;

}  // namespace

Worker::Worker(Engine& engine, std::unique_ptr<Backend> backend)
    : engine_(engine),
      backend_(std::move(backend)),
      bounce_pool_(engine.settings().bounce),
      // Beside those with the drive, every slot may hold a piece that waits to be copied or started, and every
      // direct transfer may wait for its checksum while its successor is with the drive.
      operations_(2 * engine.settings().depth + bounce_pool_.most_slots()) {
  for (uint32_t token = static_cast<uint32_t>(operations_.size()); token-- > 0;) free_.push_back(token);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& e) {
    throw SystemError(e.code().value(), "cannot start a thread");
  }
}

Worker::~Worker() {
  if (thread_.joinable()) thread_.join();
}

void Worker::run() {
  for (;;) {
    reap();
    refill();
    if (spend_time_on_bytes() || fill_a_slot()) continue;
    if (has_room()) {
      const Engine::Advice advice = engine_.before_sleep(*this, [this](Direction direction, const Piece& piece) {
        return can_start_now(direction, piece) || can_fill_now(direction, piece);
      });
      if (advice == Engine::Advice::stop) return;
      if (advice == Engine::Advice::work) continue;
    }
    backend_->commit(true);  // starts what refill() queued and waits, in one system call
  }
}

void Worker::reap() {
  outcomes_.clear();
  backend_->reap(outcomes_);
  if (outcomes_.empty()) return;
  const auto now = std::chrono::steady_clock::now();  // one look at the clock for all
  for (const Outcome& outcome : outcomes_) settle(outcome, now);
}

bool Worker::may_start(const Operation& operation) const {
  return operation.piece.route != Route::bounced || drive_takes_bounced(operation.piece.nbytes);
}

bool Worker::drive_takes_bounced(size_t nbytes) const {
  return bounced_in_flight_ == 0 || bounced_in_flight_ + nbytes <= bounce_pool_.in_flight_limit();
}

bool Worker::can_start_now(Direction direction, const Piece& piece) const {
  if (!has_room()) return false;
  if (piece.route != Route::bounced) return true;
  return direction == Direction::read && bounce_pool_.has_room(piece.nbytes) && drive_takes_bounced(piece.nbytes);
}

bool Worker::can_fill_now(Direction direction, const Piece& piece) const {
  return direction == Direction::write && piece.route == Route::bounced && bounce_pool_.has_room(piece.nbytes) &&
         !free_.empty();
}

void Worker::refill() {
  while (!to_start_.empty() && with_backend_ < engine_.settings().depth && may_start(operations_[to_start_.front()])) {
    if (!start(to_start_.front())) return;
    to_start_.pop_front();
  }
  for (;;) {
    auto cut = engine_.next_piece(
        [this](Direction direction, const Piece& piece) { return can_start_now(direction, piece); });
    if (!cut) return;
    const auto token = new_operation(std::move(*cut));
    if (token && !start(*token)) {
      to_start_.push_back(*token);
      return;
    }
  }
}

std::optional<uint32_t> Worker::new_operation(Engine::Cut cut) {
  const uint32_t token = free_.back();
  free_.pop_back();
  Operation& operation = operations_[token];
  operation = Operation{};
  // Held separately: a request lets go of its file when it ends, and its failure may end it before this piece.
  operation.file = cut.request->file;
  operation.request = std::move(cut.request);
  operation.piece = cut.piece;
  if (cut.piece.route == Route::bounced) {
    operation.slot = bounce_pool_.take(cut.piece.nbytes);
    if (!operation.slot) {
      abandon(token, ENOMEM, "there is no memory for bounce buffers; an aligned array needs none");
      return std::nullopt;
    }
  }
  operation.to_sum = operation.request->checksum && operation.request->transfer.direction == Direction::write;
  if (operation.to_sum && !operation.slot) to_sum_.push_back(token);  // a bounced one is summed up as it is copied
  return token;
}

Submission Worker::submission_of(uint32_t token) const {
  const Operation& operation = operations_[token];
  const Piece& piece = operation.piece;
  std::byte* address = operation.slot ? operation.slot : memory_of(operation);
  return {operation.request->transfer.direction,
          operation.file->fd(piece.member, piece.route),
          address + operation.moved,
          piece.nbytes - operation.moved,
          piece.file_offset + operation.moved,
          token};
}

bool Worker::start(uint32_t token) {
  if (!backend_->queue(submission_of(token))) return false;
  Operation& operation = operations_[token];
  operation.started = std::chrono::steady_clock::now();
  ++with_backend_;
  if (operation.slot) bounced_in_flight_ += operation.piece.nbytes;
  engine_.counters_.pieces.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void Worker::settle(const Outcome& outcome, std::chrono::steady_clock::time_point now) {
  Operation& operation = operations_[outcome.token];
  --with_backend_;
  if (operation.slot) bounced_in_flight_ -= operation.piece.nbytes;
  const Direction direction = operation.request->transfer.direction;
  auto& latencies = direction == Direction::read ? engine_.read_latencies_ : engine_.write_latencies_;
  latencies.add(static_cast<uint64_t>(std::chrono::nanoseconds(now - operation.started).count()));
  if (outcome.result == -EAGAIN || outcome.result == -EINTR) {
    to_start_.push_back(outcome.token);
    return;
  }
  // We cancel nothing; the kernel does, when I/O through the page cache needs a helper thread of io_uring and the
  // process may not have one more (RLIMIT_NPROC).
  const int64_t result = outcome.result == -ECANCELED ? move_blocking(submission_of(outcome.token)) : outcome.result;
  if (result < 0) {
    abandon(outcome.token, static_cast<int>(-result), "");
    return;
  }
  const size_t moved = operation.moved + static_cast<size_t>(result);
  if (is_complete(operation.piece, direction, moved)) {
    if (operation.to_sum) {
      operation.to_sum = false;
      std::erase(to_sum_, outcome.token);
      settled_.push_back(outcome.token);
    } else if (direction == Direction::read && (operation.slot || operation.request->checksum)) {
      settled_.push_back(outcome.token);
    } else {
      complete(outcome.token);
    }
    return;
  }
  const auto next = resume_at(operation.piece, operation.file->alignment(), operation.moved, moved);
  if (next) {
    operation.moved = *next;
    engine_.counters_.resumed.fetch_add(1, std::memory_order_relaxed);
    to_start_.push_back(outcome.token);
  } else if (direction == Direction::read) {
    abandon(outcome.token, ENODATA, "the file is too short for it");
  } else {
    abandon(outcome.token, EIO, "the drive accepted no byte and gave no reason");
  }
}

bool Worker::spend_time_on_bytes() {
  if (to_sum_.empty() && settled_.empty()) return false;
  backend_->commit(false);  // the drive works meanwhile
  size_t budget = kBytesPerRound;
  const auto spend = [&budget](size_t nbytes) { budget -= nbytes < budget ? nbytes : budget; };
  while (budget && !settled_.empty()) {
    const uint32_t token = settled_.front();
    settled_.pop_front();
    Operation& operation = operations_[token];
    if (operation.slot) {
      copy(operation, memory_of(operation), operation.slot + operation.piece.skip);
    } else {
      operation.raw_crc = checksum_of(operation);
    }
    spend(operation.piece.useful);
    complete(token);
  }
  while (budget && !to_sum_.empty()) {
    // The newest: the drive comes to it last, and what it reads just now is not taken into another cache meanwhile.
    Operation& operation = operations_[to_sum_.back()];
    to_sum_.pop_back();
    operation.raw_crc = checksum_of(operation);
    operation.to_sum = false;
    spend(operation.piece.useful);
  }
  return true;
}

bool Worker::fill_a_slot() {
  auto cut = engine_.next_piece(
      [this](Direction direction, const Piece& piece) { return can_fill_now(direction, piece); });
  if (!cut) return false;
  backend_->commit(false);
  const auto token = new_operation(std::move(*cut));
  if (!token) return true;
  Operation& operation = operations_[*token];
  copy(operation, operation.slot, memory_of(operation));
  operation.to_sum = false;
  to_start_.push_back(*token);
  return true;
}

void Worker::copy(Operation& operation, std::byte* to, const std::byte* from) {
  const Target target = to == operation.slot ? Target::slot : Target::memory;
  if (operation.request->checksum) {
    operation.raw_crc = copy_block_and_sum(to, from, operation.piece.useful, target);
  } else {
    copy_block(to, from, operation.piece.useful, target);
  }
}

void Worker::complete(uint32_t token) {
  const Operation& operation = operations_[token];
  const Piece& piece = operation.piece;
  Counters& counters = engine_.counters_;
  auto& bytes = operation.request->transfer.direction == Direction::read ? counters.bytes_read : counters.bytes_written;
  bytes.fetch_add(piece.useful, std::memory_order_relaxed);
  if (piece.route == Route::bounced) counters.bounced_bytes.fetch_add(piece.useful, std::memory_order_relaxed);
  if (piece.route == Route::cached) counters.cached_bytes.fetch_add(piece.useful, std::memory_order_relaxed);
  retire(token, operation.request->piece_done(piece, operation.raw_crc));
}

void Worker::abandon(uint32_t token, int code, const char* note) {
  Operation& operation = operations_[token];
  // Its checksum is not wanted any more; the token must not be found there once it has a new meaning.
  if (operation.to_sum) std::erase(to_sum_, token);
  operation.request->fail(code, note);
  retire(token, operation.request->piece_lost());
}

void Worker::retire(uint32_t token, bool last) {
  Operation& operation = operations_[token];
  if (operation.slot) bounce_pool_.give_back(operation.slot, operation.piece.nbytes);
  const std::shared_ptr<Request> request = std::move(operation.request);
  // Closed, if this was its last user, before anyone hears that the request has ended.
  operation.file.reset();
  free_.push_back(token);
  if (last) engine_.finish(request);
}

uint32_t Worker::checksum_of(const Operation& operation) const {
  return crc32c_raw(0, memory_of(operation), operation.piece.useful);
}

std::byte* Worker::memory_of(const Operation& operation) const {
  return reinterpret_cast<std::byte*>(operation.request->transfer.address) + operation.piece.position;
}

}  // namespace deepnvme

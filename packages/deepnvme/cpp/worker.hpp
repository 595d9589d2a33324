// One thread with one backend: keeps the drive busy first, copies and sums up after that.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "backend.hpp"
#include "bounce_pool.hpp"
#include "engine.hpp"

namespace deepnvme {

// Note: order of work. A round is: reap what the drive finished, hand it new pieces at once, and only then spend
// time on bytes (copying between slot and memory, checksums). Copying first would leave the drive without work for
// as long as the copy takes; in this order one thread bounces at the drive's full rate.
class Worker {
 public:
  Worker(Engine& engine, std::unique_ptr<Backend> backend);
  ~Worker();  // joins; the engine has been told to stop before

  void wake() { backend_->wake(); }

 private:
  // A piece on its way. Its index is the token by which the backend knows it.
  struct Operation {
    std::shared_ptr<Request> request;
    std::shared_ptr<File> file;
    Piece piece;
    std::byte* slot = nullptr;  // of a bounced piece
    size_t moved = 0;           // of piece.nbytes, in earlier attempts
    uint32_t raw_crc = 0;
    std::chrono::steady_clock::time_point started;
    bool to_sum = false;        // a write with the drive whose checksum is not taken yet
  };

  void run();
  void reap();
  // Queues as much as the drive may hold.
  void refill();
  // Copies and checksums of pieces under way, up to a budget; false when there was nothing to do.
  bool spend_time_on_bytes();
  // Prepares a bounced write ahead of its turn with the drive; false when there is none or no slot for it.
  bool fill_a_slot();

  bool has_room() const { return with_backend_ < engine_.settings().depth && !free_.empty(); }
  bool may_start(const Operation& operation) const;
  bool drive_takes_bounced(size_t nbytes) const;
  bool can_start_now(Direction direction, const Piece& piece) const;
  bool can_fill_now(Direction direction, const Piece& piece) const;

  // Its token; nothing when there was no memory for a slot, which has failed the request.
  std::optional<uint32_t> new_operation(Engine::Cut cut);
  Submission submission_of(uint32_t token) const;
  bool start(uint32_t token);
  void settle(const Outcome& outcome, std::chrono::steady_clock::time_point now);
  void complete(uint32_t token);
  void abandon(uint32_t token, int code, const char* note);
  void retire(uint32_t token, bool last);
  // Between slot and memory, with the checksum if one is wanted.
  void copy(Operation& operation, std::byte* to, const std::byte* from);
  uint32_t checksum_of(const Operation& operation) const;
  std::byte* memory_of(const Operation& operation) const;

  Engine& engine_;
  std::unique_ptr<Backend> backend_;
  BouncePool bounce_pool_;
  std::vector<Operation> operations_;
  std::vector<uint32_t> free_;    // unused operations
  std::deque<uint32_t> to_start_;  // ready: filled slots, short ones to be continued, and what met a busy backend
  std::vector<uint32_t> to_sum_;   // writes with the drive whose checksum is still to be taken
  std::deque<uint32_t> settled_;   // the drive has finished; the bytes are still to be copied or summed up
  std::vector<Outcome> outcomes_;
  size_t with_backend_ = 0;
  size_t bounced_in_flight_ = 0;  // bytes
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace deepnvme

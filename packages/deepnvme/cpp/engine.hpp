// The engine: takes requests from any thread, lets its workers carry them out, and tells when they have ended.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend.hpp"
#include "latency.hpp"
#include "request.hpp"

namespace deepnvme {

struct EngineSettings {
  std::string backend = "io_uring";
  unsigned depth = 32;       // pieces with the drive at once, for each ring
  size_t block = 1 << 20;    // largest piece
  unsigned threads = 1;      // rings (io_uring, libaio), each with a thread; or threads that read and write
  size_t bounce = 6 << 20;   // bytes through which misaligned pieces pass, for each ring
};

// Counters since the engine was made; every one only grows.
struct Counters {
  std::atomic<uint64_t> requests{0}, finished{0}, failed{0}, cancelled{0};
  std::atomic<uint64_t> bytes_read{0}, bytes_written{0};        // useful bytes, as people asked for them
  std::atomic<uint64_t> bounced_bytes{0}, cached_bytes{0};      // of those, by the slower routes (see Route)
  std::atomic<uint64_t> pieces{0}, resumed{0};                  // system I/Os, and those that were short and went on
};

class Worker;

class Engine {
 public:
  // Throws SystemError when the backend cannot run with these settings.
  explicit Engine(const EngineSettings& settings);
  // Waits for what is under way.
  ~Engine();

  struct Order {
    std::shared_ptr<Request> earlier;
    bool must_succeed;  // its failure is also the later one's
  };
  // Returns at once; the request is carried out when those in `after` have ended. The memory must live until the
  // request's completion is set. Throws SystemError(ESHUTDOWN) after close().
  std::shared_ptr<Request> submit(Direction direction, std::shared_ptr<File> file, uintptr_t address, size_t nbytes,
                                  uint64_t offset, bool checksum, const std::vector<Order>& after);

  // No further piece of it is started; true unless all had been already. It ends when the drive is done with the
  // pieces that are under way.
  bool cancel(const std::shared_ptr<Request>& request);

  // Finishes everything and stops the workers. Harmless when repeated.
  void close();

  // ids of requests that ended since the last call.
  std::vector<uint64_t> take_finished();
  // Blocks until a request that wants a notification has ended; empty after close().
  std::vector<uint64_t> wait_notifications();
  // Whether nothing was under way at some moment within `limit`.
  bool wait_idle(std::chrono::nanoseconds limit);
  uint64_t under_way() const;

  const EngineSettings& settings() const { return settings_; }
  const Counters& counters() const { return counters_; }
  // From handing a piece to the backend to hearing of its end.
  const LatencyHistogram& latencies(Direction direction) const {
    return direction == Direction::read ? read_latencies_ : write_latencies_;
  }

 private:
  friend class Worker;

  struct Cut {
    std::shared_ptr<Request> request;
    Piece piece;
  };
  // -- for workers; `accepts(direction, piece)` tells whether the worker can take such a piece now --
  // The next piece to carry out, if there is one that is accepted.
  template <class Accepts>
  std::optional<Cut> next_piece(Accepts accepts);
  // What a worker with nothing to do should do. After `sleep`, the next request wakes it.
  enum class Advice { sleep, work, stop };
  template <class Accepts>
  Advice before_sleep(Worker& worker, Accepts accepts);
  void finish(const std::shared_ptr<Request>& request);

  void enqueue(const std::shared_ptr<Request>& request);
  void wake_sleepers();  // under queue_mutex_
  void release_dependent(const Request& earlier, const Request::Dependent& dependent);

  const EngineSettings settings_;
  Counters counters_;
  LatencyHistogram read_latencies_, write_latencies_;

  mutable std::mutex queue_mutex_;  // guards the queue and the issuing part of every request
  std::deque<std::shared_ptr<Request>> queue_;
  std::vector<Worker*> sleepers_;
  uint64_t next_id_ = 1;
  bool stopping_ = false;  // close() was called

  mutable std::mutex finished_mutex_;
  std::condition_variable idle_, notification_;
  std::vector<uint64_t> finished_;
  std::vector<uint64_t> notifications_;
  uint64_t under_way_ = 0;
  bool notifications_end_ = false;

  const int pid_;  // a forked child has none of the threads
  std::vector<std::unique_ptr<Worker>> workers_;
};

template <class Accepts>
std::optional<Engine::Cut> Engine::next_piece(Accepts accepts) {
  for (;;) {
    std::shared_ptr<Request> ended;
    {
      std::lock_guard lock(queue_mutex_);
      if (queue_.empty()) return std::nullopt;
      const std::shared_ptr<Request>& front = queue_.front();
      if (front->cancelled || front->failed() || front->transfer.nbytes == 0) {
        ended = front;
        queue_.pop_front();
      } else {
        Cut cut{front, front->transfer.piece_at(front->issued)};
        if (!accepts(front->transfer.direction, cut.piece)) return std::nullopt;
        front->piece_issued();
        front->issued += cut.piece.useful;
        if (front->issued == front->transfer.nbytes) {
          // The piece just cut is still outstanding, so this cannot be the end of the request.
          front->issuing_done();
          queue_.pop_front();
        }
        return cut;
      }
    }
    if (ended->issuing_done()) finish(ended);
  }
}

template <class Accepts>
Engine::Advice Engine::before_sleep(Worker& worker, Accepts accepts) {
  std::lock_guard lock(queue_mutex_);
  if (!queue_.empty()) {
    const Request& front = *queue_.front();
    if (front.cancelled || front.failed() || front.transfer.nbytes == 0) return Advice::work;
    if (accepts(front.transfer.direction, front.transfer.piece_at(front.issued))) return Advice::work;
  } else if (stopping_ && under_way() == 0) {
    return Advice::stop;
  }
  if (std::find(sleepers_.begin(), sleepers_.end(), &worker) == sleepers_.end()) sleepers_.push_back(&worker);
  return Advice::sleep;
}

}  // namespace deepnvme

// One read or write from submission to completion: its pieces outstanding, its first error, who waits for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "completion.hpp"
#include "file.hpp"
#include "io_error.hpp"
#include "transfer.hpp"

namespace deepnvme {

class Request {
 public:
  Request(uint64_t id, std::shared_ptr<File> file, Transfer transfer, bool checksum);

  const uint64_t id;
  const Transfer transfer;
  const bool checksum;  // sum up a crc32c of the bytes while they pass

  // The file; empty once the request has ended, so that a finished request keeps no descriptor open.
  std::shared_ptr<File> file;

  // -- issuing: under the engine's queue lock ------------------------------------------------------------------
  size_t issued = 0;       // bytes already cut into pieces
  bool cancelled = false;  // no further piece is cut
  unsigned awaited = 0;    // earlier requests that must end first (see depend_on)

  // -- while pieces are under way: any worker ----------------------------------------------------------------
  // A piece was cut. Each is answered by one piece_done() or piece_lost().
  void piece_issued() { outstanding_.fetch_add(1, std::memory_order_relaxed); }
  // `raw_crc`: crc32c_raw of the piece's useful bytes, 0 without checksum. True: that was the last one of a request
  // that is wholly issued, and the caller finishes it.
  bool piece_done(const Piece& piece, uint32_t raw_crc);
  // The piece did not arrive; fail() says why. True as for piece_done.
  bool piece_lost() { return drop_one(); }
  // No more pieces will be cut. True as for piece_done.
  bool issuing_done() { return drop_one(); }

  void fail(int code, const char* note = "");
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // -- order among requests --------------------------------------------------------------------------------
  // Lets `later` wait for this one; false when this one has ended already. With `must_succeed`, the failure of this
  // one becomes the failure of `later`.
  bool add_dependent(std::shared_ptr<Request> later, bool must_succeed);
  struct Dependent {
    std::shared_ptr<Request> request;
    bool must_succeed;
  };
  // Called once, when this one has ended: whom to let go.
  std::vector<Dependent> take_dependents();
  // Takes over the error of a request that this one depends on.
  void inherit_failure(const Request& earlier);

  // -- the outcome: valid once `completion` is set -----------------------------------------------------------
  Completion completion;
  size_t moved() const { return moved_.load(std::memory_order_relaxed); }
  const IoError& error() const { return error_; }
  uint32_t crc() const;
  bool was_cancelled() const { return was_cancelled_; }
  // The engine, just before it sets `completion`.
  void seal();

  // Asks for a notification at the end; false when it has ended already.
  bool want_notification();
  bool notification_wanted();  // called once by the engine, at the end

 private:
  bool drop_one() { return outstanding_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

  std::atomic<uint32_t> outstanding_{1};  // pieces under way, and one for "not wholly issued"
  std::atomic<size_t> moved_{0};
  std::atomic<uint32_t> raw_crc_{0};
  std::atomic<bool> failed_{false};
  IoError error_;  // of the first failure: written once, by whoever sets failed_
  bool was_cancelled_ = false;

  std::mutex links_;  // guards what follows
  bool ended_ = false;
  bool notify_ = false;
  std::vector<Dependent> dependents_;
};

}  // namespace deepnvme

#include "engine.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

#include "io_error.hpp"
#include "worker.hpp"

namespace deepnvme {
namespace {

// Largest bounced piece: smaller ones cost more system calls, and a pool is to hold several.
constexpr size_t kLargestSlot = 1 << 20;  // and no larger than kContiguous

// Threads inherit the mask, so signals go to the threads of the program and never to ours.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Engine::Engine(const EngineSettings& settings) : settings_(settings), pid_(::getpid()) {
  const SignalsBlocked blocked;
  const BackendKind& kind = backend_kind(settings.backend);
  const bool threads = settings.backend == "threads";
  const unsigned workers = threads ? 1 : settings.threads;
  try {
    for (unsigned i = 0; i < workers; ++i) {
      workers_.push_back(
          std::make_unique<Worker>(*this, kind.make({.depth = settings.depth, .threads = settings.threads})));
    }
  } catch (...) {
    close();
    throw;
  }
}

Engine::~Engine() { close(); }

void Engine::close() {
  if (::getpid() != pid_) {
    // The threads stayed in the parent: joining them would wait for ever, and their locks may be held for ever.
    for (auto& worker : workers_) worker.release();
    workers_.clear();
    return;
  }
  {
    std::lock_guard lock(queue_mutex_);
    stopping_ = true;
    wake_sleepers();
  }
  workers_.clear();  // each ends when nothing is under way any more
  std::lock_guard lock(finished_mutex_);
  notifications_end_ = true;
  notification_.notify_all();
}

std::shared_ptr<Request> Engine::submit(Direction direction, std::shared_ptr<File> file, uintptr_t address,
                                        size_t nbytes, uint64_t offset, bool checksum,
                                        const std::vector<Order>& after) {
  Transfer transfer;
  transfer.direction = direction;
  transfer.address = address;
  transfer.offset = offset;
  transfer.nbytes = nbytes;
  transfer.direct = file->direct();
  transfer.alignment = file->alignment();
  transfer.members = static_cast<unsigned>(file->members().size());
  transfer.stripe = file->stripe();
  transfer.block = settings_.block;
  transfer.slot = std::min(settings_.bounce, kLargestSlot);

  uint64_t id;
  {
    // Counted under the same lock that close() takes: no request can slip in behind the workers' end.
    std::lock_guard lock(queue_mutex_);
    if (stopping_) throw SystemError(ESHUTDOWN, "the engine is closed");
    id = next_id_++;
    std::lock_guard count(finished_mutex_);
    ++under_way_;
  }
  counters_.requests.fetch_add(1, std::memory_order_relaxed);
  auto request = std::make_shared<Request>(id, std::move(file), transfer, checksum);
  if (direction == Direction::write) {
    if (const IoError error = request->file->prepare_write(offset, nbytes)) request->fail(error.code);
  }

  if (!after.empty()) {
    // One hold of our own, so that an earlier request that ends meanwhile does not let this one go too soon.
    request->awaited = 1;
    for (const Order& order : after) {
      {
        std::lock_guard lock(queue_mutex_);
        ++request->awaited;
      }
      const Request::Dependent dependent{request, order.must_succeed};
      if (!order.earlier->add_dependent(request, order.must_succeed)) release_dependent(*order.earlier, dependent);
    }
    release_dependent(*request, {request, false});
  } else {
    std::lock_guard lock(queue_mutex_);
    enqueue(request);
  }
  return request;
}

void Engine::release_dependent(const Request& earlier, const Request::Dependent& dependent) {
  if (dependent.must_succeed) dependent.request->inherit_failure(earlier);
  std::lock_guard lock(queue_mutex_);
  if (--dependent.request->awaited == 0) enqueue(dependent.request);
}

void Engine::enqueue(const std::shared_ptr<Request>& request) {
  queue_.push_back(request);
  wake_sleepers();
}

void Engine::wake_sleepers() {
  // All of them: one large request is work for every ring.
  for (Worker* worker : sleepers_) worker->wake();
  sleepers_.clear();
}

bool Engine::cancel(const std::shared_ptr<Request>& request) {
  {
    std::lock_guard lock(queue_mutex_);
    if (request->cancelled) return true;
    if (request->issued == request->transfer.nbytes || request->failed()) return false;
    request->cancelled = true;
    const auto place = std::find(queue_.begin(), queue_.end(), request);
    if (place == queue_.end()) return true;  // it waits for an earlier one, and ends when its turn comes
    queue_.erase(place);
  }
  if (request->issuing_done()) finish(request);
  return true;
}

void Engine::finish(const std::shared_ptr<Request>& request) {
  request->seal();
  counters_.finished.fetch_add(1, std::memory_order_relaxed);
  if (request->failed()) counters_.failed.fetch_add(1, std::memory_order_relaxed);
  if (request->was_cancelled()) counters_.cancelled.fetch_add(1, std::memory_order_relaxed);
  const std::vector<Request::Dependent> dependents = request->take_dependents();
  const bool notify = request->notification_wanted();
  // Done before it is listed: who keeps an array for it may rely on "not done" meaning "still to be listed".
  request->completion.set();
  for (const Request::Dependent& dependent : dependents) release_dependent(*request, dependent);
  bool last;
  {
    std::lock_guard lock(finished_mutex_);
    finished_.push_back(request->id);
    if (notify) {
      notifications_.push_back(request->id);
      notification_.notify_all();
    }
    last = --under_way_ == 0;
    if (last) idle_.notify_all();
  }
  if (last) {
    std::lock_guard lock(queue_mutex_);
    if (stopping_) wake_sleepers();
  }
}

std::vector<uint64_t> Engine::take_finished() {
  std::lock_guard lock(finished_mutex_);
  return std::exchange(finished_, {});
}

std::vector<uint64_t> Engine::wait_notifications() {
  std::unique_lock lock(finished_mutex_);
  notification_.wait(lock, [this] { return notifications_end_ || !notifications_.empty(); });
  return std::exchange(notifications_, {});
}

bool Engine::wait_idle(std::chrono::nanoseconds limit) {
  std::unique_lock lock(finished_mutex_);
  return idle_.wait_for(lock, limit, [this] { return under_way_ == 0; });
}

uint64_t Engine::under_way() const {
  std::lock_guard lock(finished_mutex_);
  return under_way_;
}

}  // namespace deepnvme

// Engine "threads": pread and pwrite in a few threads. It runs everywhere.

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "backend.hpp"
#include "blocking_io.hpp"
#include "io_error.hpp"

namespace deepnvme {
namespace {

class ThreadBackend : public Backend {
 public:
  ThreadBackend(unsigned depth, unsigned threads) : depth_(depth) {
    try {
      for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error& e) {
      stop();  // those that were started
      throw SystemError(e.code().value(), "cannot start a thread");
    }
  }

  ~ThreadBackend() override { stop(); }

  bool queue(const Submission& submission) override {
    if (queued_.size() >= depth_) return false;
    queued_.push_back(submission);
    return true;
  }

  void commit(bool wait) override {
    std::unique_lock lock(mutex_);
    if (!queued_.empty()) {
      todo_.insert(todo_.end(), queued_.begin(), queued_.end());
      if (queued_.size() == 1) {
        work_.notify_one();
      } else {
        work_.notify_all();
      }
      queued_.clear();
    }
    if (wait) {
      news_.wait(lock, [this] { return woken_ || !done_.empty(); });
      woken_ = false;
    }
  }

  void reap(std::vector<Outcome>& outcomes) override {
    std::lock_guard lock(mutex_);
    outcomes.insert(outcomes.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    news_.notify_one();
  }

 private:
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return stopping_ || !todo_.empty(); });
      if (todo_.empty()) return;
      const Submission submission = todo_.front();
      todo_.pop_front();
      lock.unlock();
      const int64_t result = move_blocking(submission);
      lock.lock();
      done_.push_back({submission.token, result});
      news_.notify_one();
    }
  }

  const unsigned depth_;
  std::vector<Submission> queued_;  // by the worker, before commit
  std::mutex mutex_;                // guards all below
  std::condition_variable work_, news_;
  std::deque<Submission> todo_;
  std::vector<Outcome> done_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_thread_backend(const BackendSettings& settings) {
  return std::make_unique<ThreadBackend>(settings.depth, settings.threads);
}

}  // namespace deepnvme

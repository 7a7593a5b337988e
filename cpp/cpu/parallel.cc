#include "cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

namespace jax_gg::cpu {
namespace {

// Outlives the call that made it: a pool may start a helper long after the last index was taken. Such a helper finds
// nothing to take and must not touch `body`, which lives on the caller's stack.
struct Shared {
  const std::function<void(int64_t)>* body;
  int64_t count;
  std::atomic<int64_t> next{0};

  std::mutex mutex;
  std::condition_variable all_done;
  int64_t done = 0;
  std::exception_ptr error;

  void Work() {
    for (;;) {
      const int64_t i = next.fetch_add(1);
      if (i >= count) return;
      std::exception_ptr caught;
      try {
        (*body)(i);
      } catch (...) {
        caught = std::current_exception();
      }
      std::lock_guard<std::mutex> lock(mutex);
      if (caught && !error) error = caught;
      if (++done == count) all_done.notify_one();
    }
  }
};

}  // namespace

void ParallelFor(const Executor& executor, int64_t count, const std::function<void(int64_t)>& body) {
  if (count <= 1 || executor.threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  auto shared = std::make_shared<Shared>();
  shared->body = &body;
  shared->count = count;
  const int64_t helpers = std::min(executor.threads, count) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    executor.schedule([shared] { shared->Work(); });
  }
  shared->Work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done == shared->count; });
  if (shared->error) std::rethrow_exception(shared->error);
}

}  // namespace jax_gg::cpu

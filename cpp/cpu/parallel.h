// Work sharing on a thread pool that belongs to someone else.

#ifndef JAX_GG_CPU_PARALLEL_H_
#define JAX_GG_CPU_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace jax_gg::cpu {

// A pool, as far as this library needs to know it.
struct Executor {
  std::function<void(std::function<void()>)> schedule;
  int64_t threads;
};

// Calls body(i) once for every i in [0, count), on the caller and on whatever pool threads are free, and returns when
// all calls have. Rethrows the first exception of a body. The caller works too and never waits for a task that has not
// begun, so this is safe on a pool whose threads are all busy, or all waiting in here.
void ParallelFor(const Executor& executor, int64_t count, const std::function<void(int64_t)>& body);

}  // namespace jax_gg::cpu

#endif  // JAX_GG_CPU_PARALLEL_H_

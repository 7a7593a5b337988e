// The grouped matmul on the CPU.

#ifndef JAX_GG_CPU_GROUPED_H_
#define JAX_GG_CPU_GROUPED_H_

#include "cpu/parallel.h"
#include "problem.h"

namespace jax_gg::cpu {

// Computes the whole problem, every element of `out` included. Throws only std::bad_alloc.
void Grouped(const Executor& executor, const GroupedProblem& problem);

}  // namespace jax_gg::cpu

#endif  // JAX_GG_CPU_GROUPED_H_

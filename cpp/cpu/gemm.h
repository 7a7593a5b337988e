// One dense matrix product on the CPU: C[m, n] = op(A)[m, k] op(B)[k, n].

#ifndef JAX_GG_CPU_GEMM_H_
#define JAX_GG_CPU_GEMM_H_

#include <cstdint>

#include "cpu/parallel.h"
#include "problem.h"

namespace jax_gg::cpu {

// A row-major matrix in memory. `transposed` says that op() turns its stored rows into columns.
struct Operand {
  const void* data;
  int64_t row_stride;
  bool transposed;
};

// Dimensions are positive; C's rows are dense. Products and sums are in f32, for f64 in f64. Operands in another dtype
// are converted a block at a time: temporaries stay below 12 MiB whatever the dimensions.
void Gemm(const Executor& executor, Dtype in, Dtype out, int64_t m, int64_t n, int64_t k, Operand a, Operand b,
          void* c);

}  // namespace jax_gg::cpu

#endif  // JAX_GG_CPU_GEMM_H_

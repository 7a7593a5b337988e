// One dense matrix product on the CPU: C[m, n] = op(A)[m, k] op(B)[k, n].

#ifndef JAX_GG_CPU_GEMM_H_
#define JAX_GG_CPU_GEMM_H_

#include <cstdint>

#include "problem.h"

namespace jax_gg::cpu {

// A row-major matrix in memory. `transposed` says that op() turns its stored rows into columns.
struct Operand {
  const void* data;
  int64_t row_stride;
  bool transposed;
};

// Dimensions are positive, m and n below 2^31. Runs on the calling thread. Products and sums are in f32, for f64 in
// f64. Operands in another dtype are converted a block at a time: temporaries of (m + n) 512 + m n elements at most.
void Gemm(Dtype in, Dtype out, int64_t m, int64_t n, int64_t k, Operand a, Operand b, void* c, int64_t c_row_stride);

}  // namespace jax_gg::cpu

#endif  // JAX_GG_CPU_GEMM_H_

// What tells the kernels apart.

#ifndef JAX_GG_CUDA_TILE_H_
#define JAX_GG_CUDA_TILE_H_

#include "problem.h"

namespace jax_gg::cuda {

// How the operands of one group lie in memory, rows first: A[m, k] x B[k, n] of the matmul that a tile computes, which
// in tgmm is lhs^T[k, m] x rhs[m, n].
enum class Layout {
  kNN,  // gmm
  kNT,  // gmm with transpose_rhs
  kTN,  // tgmm
};

// How operands are multiplied; sums are always f32.
enum class Math {
  kTensor,  // as they are: exact products of 16-bit operands
  kTf32,    // f32 operands rounded to TF32: 10 bits of mantissa
  kF32,     // f32 operands at full accuracy
};

struct Tile {
  int m, n, k, stages;
  int cluster_m = 1, cluster_n = 1;  // tiles of the blocks that load together

  // Of a block: the operands of all stages, and a little for what else a kernel keeps there.
  constexpr int64_t SharedBytes(Dtype in) const { return int64_t{stages} * (m + n) * k * ByteWidth(in) + 1024; }
};

}  // namespace jax_gg::cuda

#endif  // JAX_GG_CUDA_TILE_H_

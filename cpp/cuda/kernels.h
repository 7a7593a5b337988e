// The kernel table: every kernel of this build, described so that select.cc can choose one and a person can read it.

#ifndef JAX_GG_CUDA_KERNELS_H_
#define JAX_GG_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <span>
#include <string>

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

  // Of a block: the operands of all stages, and a little for what else a kernel keeps there.
  constexpr int64_t SharedBytes(Dtype in) const { return int64_t{stages} * (m + n) * k * ByteWidth(in) + 1024; }
};

struct Kernel {
  const char* family;  // named after the architecture that its instructions need
  int min_arch;        // compute capability, 10 * major + minor
  Layout layout;
  Dtype in, out;
  Math math;
  int alignment;  // k and n must be multiples, and pointers aligned to as many elements
  Tile tile;
  int rate;  // TFLOP/s when all tiles are full and many, measured once on one GPU; only ratios matter

  // Enqueues the whole problem on the stream and returns. No allocation, no synchronisation, no read of device memory:
  // XLA may be capturing the stream into a CUDA graph. `workspace` holds GroupedProblem::WorkspaceBytes().
  cudaError_t (*launch)(const GroupedProblem& problem, void* workspace, cudaStream_t stream);

  // Such as sm80_128x256x32x3_a8: family, tile and stages, alignment. Kernels for other operands may share it.
  std::string Name() const;
  // Such as "gmm transpose_rhs bf16 -> f32".
  std::string Operands() const;
};

std::span<const Kernel> Kernels();

}  // namespace jax_gg::cuda

#endif  // JAX_GG_CUDA_KERNELS_H_

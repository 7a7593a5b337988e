// The kernel table: every kernel of this build, described so that select.cc can choose one and a person can read it.

#ifndef JAX_GG_CUDA_KERNELS_H_
#define JAX_GG_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <span>
#include <string>

#include "cuda/tile.h"
#include "problem.h"

namespace jax_gg::cuda {

struct Kernel {
  const char* family;      // named after the architecture that its instructions need
  int min_arch, max_arch;  // compute capability, 10 * major + minor
  Layout layout;
  Dtype in, out;
  Math math;
  int alignment;  // k and n must be multiples, and pointers aligned to as many elements
  Tile tile;
  int rate;           // TFLOP/s when all tiles are full and many, measured once on one GPU; only ratios matter
  int64_t max_rows;   // of all problems of a call
  int64_t max_tiles;  // of the result

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

// What the kernel table needs of sm80.cuh, without CUTLASS.

#ifndef JAX_GG_CUDA_SM80_H_
#define JAX_GG_CUDA_SM80_H_

#include <cuda_runtime_api.h>

#include "cuda/tile.h"
#include "problem.h"

namespace jax_gg::cuda::sm80 {

// Kernel::launch of one kernel. Instantiated once for each line that sm80_kernels.cmake writes, in a file of its own.
template <Layout layout, Dtype in, Dtype out, Math math, int alignment, int tile_m, int tile_n, int tile_k, int warp_m,
          int warp_n, int stages>
cudaError_t Launch(const GroupedProblem& problem, void* workspace, cudaStream_t stream);

}  // namespace jax_gg::cuda::sm80

#endif  // JAX_GG_CUDA_SM80_H_

// What the kernel table needs of sm90.cuh, without CuTe.

#ifndef JAX_GG_CUDA_SM90_H_
#define JAX_GG_CUDA_SM90_H_

#include <cuda_runtime_api.h>

#include "cuda/tile.h"
#include "problem.h"

namespace jax_gg::cuda::sm90 {

// Kernel::launch of one kernel. Instantiated once for each line that sm90_kernels.cmake writes, in a file of its own.
template <Layout layout, Dtype in, Dtype out, int tile_m, int tile_n, int stages, int cluster_m, int cluster_n,
          bool cooperative>
cudaError_t Launch(const GroupedProblem& problem, void* workspace, cudaStream_t stream);

}  // namespace jax_gg::cuda::sm90

#endif  // JAX_GG_CUDA_SM90_H_

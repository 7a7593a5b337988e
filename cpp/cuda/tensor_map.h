// TMA descriptors, encoded on the host from shapes and addresses alone.

#ifndef JAX_GG_CUDA_TENSOR_MAP_H_
#define JAX_GG_CUDA_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "problem.h"

namespace jax_gg::cuda {

// A matrix of [outer, rows, cols], cols contiguous, read in boxes of box_rows rows of 128 bytes each, whose 16-byte
// parts are swizzled as wgmma and stmatrix want them. What lies outside reads as zero and is not written.
cudaError_t EncodeMatrices(CUtensorMap* map, Dtype dtype, const void* data, int64_t outer, int64_t rows, int64_t cols,
                           int box_rows);

// The same of one matrix, but with a bound on rows that each access chooses: the box at coordinates
//     {col, kRagged - (end - row), kRagged, end}
// begins at `row` and is cut at `end`. Dimensions 1 and 3 both step by a row; dimension 2 steps so that kRagged of its
// steps take back, modulo 2^64, what kRagged rows add: the sum is the row wanted, while the hardware checks dimension 1
// alone against its extent of kRagged.
constexpr int32_t kRagged = 1 << 30;
cudaError_t EncodeRagged(CUtensorMap* map, Dtype dtype, const void* data, int64_t cols, int box_rows);

}  // namespace jax_gg::cuda

#endif  // JAX_GG_CUDA_TENSOR_MAP_H_

// What the fill kernel writes and the sm_80 kernels read: one GEMM for each group of rows, cut into output tiles.

#ifndef JAX_GG_CUDA_SEGMENTS_H_
#define JAX_GG_CUDA_SEGMENTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "problem.h"

namespace jax_gg::cuda {

// c[m, n] = a[m, k] b[k, n], every pointer at its first element; n and the leading dimensions are the same for all.
// gmm has one for each group, with m rows, and one for the rows past the sum; those, and groups without a weight in
// this call, have k = 0, whose product is exact zeros. tgmm has one for each weight, with the group's rows as k.
struct Segment {
  const char* a;
  const char* b;
  char* c;
  int32_t m, k;
};

// Where each part of the workspace lies; sized by GroupedProblem::WorkspaceBytes().
struct Workspace {
  uint32_t* next_tile;  // tiles handed out beyond each block's first; the fill kernel sets it to 0
  int64_t* row_begin;   // [batch, groups + 1]: first row of each group, then of the rows past the sum
  Segment* segments;    // [count], in the order in which they are computed
  int32_t* tile_end;    // [count], gmm: tiles along m of the segments up to and including this one
  int64_t count;

  Workspace(const GroupedProblem& p, void* data) : next_tile(static_cast<uint32_t*>(data)) {
    static_assert(sizeof(Segment) + sizeof(int64_t) + sizeof(int32_t) <= GroupedProblem::kWorkspaceBytesPerEntry);
    row_begin = reinterpret_cast<int64_t*>(static_cast<char*>(data) + GroupedProblem::kWorkspaceHeaderBytes);
    segments = reinterpret_cast<Segment*>(row_begin + p.batch * (p.groups + 1));
    count = p.mode == Mode::kGmm ? p.batch * (p.groups + 1) : p.batch * p.weights;
    tile_end = reinterpret_cast<int32_t*>(segments + count);
  }
};

// Enqueues the kernel that turns group sizes into segments for tiles of `tile_m` rows.
cudaError_t Fill(const GroupedProblem& problem, const Workspace& workspace, int tile_m, cudaStream_t stream);

}  // namespace jax_gg::cuda

#endif  // JAX_GG_CUDA_SEGMENTS_H_

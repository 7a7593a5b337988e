#include <algorithm>

#include "cuda/fill.cuh"

namespace jax_gg::cuda {

cudaError_t Fill(const GroupedProblem& problem, const Workspace& workspace, int tile_m, cudaStream_t stream) {
  // A block no wider than the work: a scan costs by the width of its block, used or not.
  const int64_t scanned = problem.batch * (problem.groups + (problem.mode == Mode::kGmm));
  const int64_t entries = std::max(scanned, workspace.count);
  const auto launch = [&]<int kThreads>() {
    if (problem.mode == Mode::kGmm) {
      FillKernel<Mode::kGmm, kThreads><<<1, kThreads, 0, stream>>>(problem, workspace, tile_m);
    } else {
      FillKernel<Mode::kTgmm, kThreads><<<1, kThreads, 0, stream>>>(problem, workspace, tile_m);
    }
  };
  if (entries <= 32) {
    launch.template operator()<32>();
  } else if (entries <= 128) {
    launch.template operator()<128>();
  } else if (entries <= 512) {
    launch.template operator()<512>();
  } else {
    launch.template operator()<1024>();
  }
  return cudaGetLastError();
}

}  // namespace jax_gg::cuda

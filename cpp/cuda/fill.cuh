// The fill kernel: group sizes, on the device, to the arguments of a grouped GEMM.
//
// One block. It scans the sizes to the rows of each group; then, for gmm, scans tile counts, so that a tile finds its
// group by binary search; for tgmm, sorts the groups by rows, descending, so that the long sums start first and the
// short ones fill the gaps at the end. More entries than threads are taken a block's width at a time; the sort then
// orders within each width only, which is all that balance needs.

#ifndef JAX_GG_CUDA_FILL_CUH_
#define JAX_GG_CUDA_FILL_CUH_

#include <cub/block/block_scan.cuh>

#include "cuda/segments.h"

namespace jax_gg::cuda {

// Element of a scan that starts anew wherever `first` is set: at the first group of each problem.
struct RowCount {
  int64_t rows;
  bool first;
};

struct SumRows {
  __device__ RowCount operator()(const RowCount& left, const RowCount& right) const {
    return right.first ? right : RowCount{left.rows + right.rows, left.first};
  }
};

struct Sum {
  __device__ int32_t operator()(int32_t left, int32_t right) const { return left + right; }
};

// What an earlier width of the scan leaves for the next one.
template <typename T, typename Op>
struct Carry {
  T value;
  Op op;
  __device__ T operator()(T block_total) {
    const T before = value;
    value = op(before, block_total);
    return before;
  }
};

// Sorts one key a thread over the block, largest first (a bitonic network). Keys must differ from each other.
template <int kThreads>
__device__ uint64_t SortDescending(uint64_t key, uint64_t* shared) {
  const int thread = threadIdx.x;
  for (int size = 2; size <= kThreads; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      uint64_t other;
      if (stride < 32) {
        other = __shfl_xor_sync(0xffffffffu, key, stride);
      } else {
        __syncthreads();
        shared[thread] = key;
        __syncthreads();
        other = shared[thread ^ stride];
      }
      const bool keep_larger = ((thread & stride) == 0) == ((thread & size) == 0);
      if ((key < other) == keep_larger) key = other;
    }
  }
  return key;
}

template <Mode mode, int kThreads>
__global__ void __launch_bounds__(kThreads) FillKernel(GroupedProblem p, Workspace w, int tile_m) {
  using RowScan = cub::BlockScan<RowCount, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  using TileScan = cub::BlockScan<int32_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ union {
    typename RowScan::TempStorage rows;
    typename TileScan::TempStorage tiles;
    uint64_t keys[kThreads];
  } shared;

  const int thread = threadIdx.x;
  if (thread == 0) *w.next_tile = 0;

  // Groups and weights are counted in 32 bits, for the sake of the divisions; elements and rows in 64.
  const uint32_t groups = p.groups, slots = groups + 1, weights = p.weights;
  // tgmm has no use for the rows past the sum, but for where they begin.
  const uint32_t scanned = mode == Mode::kGmm ? slots : groups;
  const uint32_t all_scanned = static_cast<uint32_t>(p.batch) * scanned, count = w.count;

  // The first row of each group: sums of sizes, cut at m, which is what RowsEnd gives one group after the other.
  Carry<RowCount, SumRows> row_carry{{0, false}, {}};
  for (uint32_t base = 0; base < all_scanned; base += kThreads) {
    const uint32_t i = base + thread, batch = i / scanned, group = i % scanned;
    const bool is_group = i < all_scanned && group < groups;
    const int32_t size = is_group ? p.group_sizes[batch * p.group_sizes_stride + group] : 0;
    // Exclusive by hand: cub's would give the first group of a problem the rows of the problem before.
    const RowCount own{size > 0 ? size : 0, group == 0};
    RowCount sum;
    RowScan(shared.rows).InclusiveScan(own, sum, SumRows(), row_carry);
    if (i < all_scanned) {
      int64_t* const row_begin = w.row_begin + batch * slots + group;
      const int64_t begin = sum.rows - own.rows;
      row_begin[0] = begin < p.m ? begin : p.m;
      if (mode == Mode::kTgmm && group == groups - 1) row_begin[1] = sum.rows < p.m ? sum.rows : p.m;
    }
    __syncthreads();
  }

  const int64_t in_width = ByteWidth(p.in_dtype), out_width = ByteWidth(p.out_dtype);
  const auto* lhs = static_cast<const char*>(p.lhs);
  const auto* rhs = static_cast<const char*>(p.rhs);
  auto* out = static_cast<char*>(p.out);

  if constexpr (mode == Mode::kGmm) {
    Carry<int32_t, Sum> tile_carry{0, {}};
    for (uint32_t base = 0; base < count; base += kThreads) {
      const uint32_t i = base + thread, batch = i / slots, group = i % slots;
      int64_t begin = 0, rows = 0;
      if (i < count) {
        begin = w.row_begin[i];
        rows = (group < groups ? w.row_begin[i + 1] : p.m) - begin;
      }
      int32_t tiles = static_cast<int32_t>((rows + tile_m - 1) / tile_m);
      TileScan(shared.tiles).InclusiveScan(tiles, tiles, Sum(), tile_carry);
      if (i < count) {
        const int64_t weight =
            group < groups ? WeightOfGroup(group, p.group_offset[batch * p.group_offset_stride], p.weights) : -1;
        const bool multiply = weight >= 0 && p.k > 0;
        w.tile_end[i] = tiles;
        w.segments[i] = {
            lhs + (batch * p.lhs_stride + begin * p.k) * in_width,
            rhs + (batch * p.rhs_stride + (multiply ? weight * p.k * p.n : 0)) * in_width,
            out + (batch * p.out_stride() + begin * p.n) * out_width,
            static_cast<int32_t>(rows),
            multiply ? static_cast<int32_t>(p.k) : 0,
        };
      }
      __syncthreads();
    }
  } else {
    const auto rows_of = [&](uint32_t i, int64_t& begin) -> int64_t {
      const uint32_t batch = i / weights;
      const int64_t group = int64_t{i % weights} + p.group_offset[batch * p.group_offset_stride];
      if (group < 0 || group >= groups) return begin = 0;
      const uint32_t slot = batch * slots + static_cast<uint32_t>(group);
      begin = w.row_begin[slot];
      return w.row_begin[slot + 1] - begin;
    };
    for (uint32_t base = 0; base < count; base += kThreads) {
      int64_t begin = 0;
      // Rows above, the thread below: distinct keys, and equal groups stay in order. Threads without a weight come
      // last.
      const uint32_t i = base + thread;
      uint64_t key = kThreads - 1 - thread;
      if (i < count) key |= static_cast<uint64_t>(rows_of(i, begin) + 1) << 32;
      key = SortDescending<kThreads>(key, shared.keys);
      if (key >> 32 != 0) {
        const uint32_t from = base + kThreads - 1 - static_cast<uint32_t>(key), batch = from / weights;
        const int64_t rows = rows_of(from, begin);
        w.segments[i] = {
            lhs + (batch * p.lhs_stride + begin * p.k) * in_width,
            rhs + (batch * p.rhs_stride + begin * p.n) * in_width,
            out + from * p.k * p.n * out_width,
            static_cast<int32_t>(p.k),
            static_cast<int32_t>(rows),
        };
      }
      __syncthreads();
    }
  }
}

}  // namespace jax_gg::cuda

#endif  // JAX_GG_CUDA_FILL_CUH_

// Grouped GEMM for sm_80 and everything after it: CUTLASS's grouped mainloop and epilogue, over segments that a kernel
// before this one has written on the device.
//
// The tile loop is ours, not cutlass::gemm::kernel::GemmGrouped's, for four reasons. Tiles are visited in strips of
// rows that share their part of B in L2, where CUTLASS walks along a whole row of tiles and streams all of B for each.
// They are handed out by a counter, so that no block idles while another has two long tiles left. Segments are found by
// binary search of a prefix sum, where CUTLASS scans all of them, 32 at a time, in every block. And k = 0 skips the
// mainloop, which does not bear it (https://github.com/NVIDIA/cutlass/pull/1593).

#ifndef JAX_GG_CUDA_SM80_CUH_
#define JAX_GG_CUDA_SM80_CUH_

#include <atomic>
#include <string>

#include "cuda/element.h"
#include "cuda/segments.h"
#include "cuda/sm80.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/default_gemm_grouped.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

namespace jax_gg::cuda::sm80 {

template <Math math>
struct MathOf {
  using Operator = cutlass::arch::OpMultiplyAdd;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
};
template <>
struct MathOf<Math::kTf32> {
  using Operator = cutlass::arch::OpMultiplyAdd;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 8>;
};
// Each operand as the sum of two TF32 numbers; three of their four products ("3xTF32").
template <>
struct MathOf<Math::kF32> {
  using Operator = cutlass::arch::OpMultiplyAddFastF32;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 8>;
};

struct Params {
  const Segment* segments;
  const int32_t* tile_end;  // gmm
  uint32_t* next_tile;
  int64_t count;  // segments
  int32_t n;
  int32_t tiles_m;  // tgmm: tiles along m of each segment
  int64_t lda, ldb, ldc;
};

// Rows of tiles that are visited together, column by column.
constexpr int kStrip = 16;

// The first segment whose tiles end past `tile`; there is one.
__device__ inline int64_t SegmentOf(const int32_t* tile_end, int64_t count, int32_t tile) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (tile_end[middle] > tile) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

template <Layout layout, Dtype in, Dtype out, Math math, int alignment, typename TileShape, typename WarpShape,
          int stages>
struct Grouped {
  using Element = typename ElementOf<in>::type;
  using ElementC = typename ElementOf<out>::type;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  // A row of C is stored in accesses of up to 16 bytes.
  static constexpr int kStore = alignment * sizeof(ElementC) > 16 ? 16 / sizeof(ElementC) : alignment;
  using Base = typename cutlass::gemm::kernel::DefaultGemmGrouped<
      Element, std::conditional_t<layout == Layout::kTN, ColumnMajor, RowMajor>, cutlass::ComplexTransform::kNone,
      alignment, Element, std::conditional_t<layout == Layout::kNT, ColumnMajor, RowMajor>,
      cutlass::ComplexTransform::kNone, alignment, ElementC, RowMajor, float, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, TileShape, WarpShape, typename MathOf<math>::Instruction,
      cutlass::epilogue::thread::LinearCombination<ElementC, kStore, float, float,
                                                   cutlass::epilogue::thread::ScaleType::Nothing>,
      cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle, stages,
      cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly, typename MathOf<math>::Operator>::GemmKernel;
  using Mma = typename Base::Mma;
  using Epilogue = typename Base::Epilogue;
  static constexpr int kThreads = Base::kThreadCount;

  struct SharedStorage {
    union {
      typename Mma::SharedStorage mainloop;
      typename Epilogue::SharedStorage epilogue;
    };
    uint32_t next_tile;
  };

  static_assert(sizeof(SharedStorage) <= Tile{TileShape::kM, TileShape::kN, TileShape::kK, stages}.SharedBytes(in));

  __device__ static void Run(const Params& p, SharedStorage& shared) {
    const int thread = threadIdx.x, warp = cutlass::canonical_warp_idx_sync(), lane = thread % 32;
    const int32_t tiles_n = (p.n + TileShape::kN - 1) / TileShape::kN;
    const int64_t rows_of_tiles = layout == Layout::kTN ? p.tiles_m * p.count : p.tile_end[p.count - 1];
    const int64_t tiles = rows_of_tiles * tiles_n;

    for (int64_t tile = blockIdx.x; tile < tiles;) {
      // Asked for now, so that the answer is there when this tile is done.
      uint32_t next;
      if (thread == 0) next = atomicAdd(p.next_tile, 1);

      int64_t index;
      int32_t tile_m, tile_n;
      {
        // In tgmm strips end with the segment, all of which are alike; in gmm they run on into the next.
        const int64_t first = layout == Layout::kTN ? tile / (p.tiles_m * int64_t{tiles_n}) * p.tiles_m : 0;
        const int64_t rows = layout == Layout::kTN ? p.tiles_m : rows_of_tiles;
        const int64_t in_range = tile - first * tiles_n;
        const int64_t strip = in_range / (int64_t{kStrip} * tiles_n) * kStrip;
        const int32_t height = static_cast<int32_t>(rows - strip < kStrip ? rows - strip : kStrip);
        const int32_t in_strip = static_cast<int32_t>(in_range - strip * tiles_n);
        tile_n = in_strip / height;
        tile_m = static_cast<int32_t>(strip) + in_strip % height;
        if constexpr (layout == Layout::kTN) {
          index = first / p.tiles_m;
        } else {
          index = SegmentOf(p.tile_end, p.count, tile_m);
          if (index > 0) tile_m -= p.tile_end[index - 1];
        }
      }
      const Segment segment = p.segments[index];
      const int m = tile_m * TileShape::kM, n = tile_n * TileShape::kN;

      typename Mma::FragmentC accumulators;
      accumulators.clear();
      // The tile before is through with the shared memory that the mainloop writes.
      __syncthreads();
      if (segment.k > 0) {
        typename Mma::IteratorA a(typename Mma::IteratorA::Layout(p.lda),
                                  reinterpret_cast<Element*>(const_cast<char*>(segment.a)), {segment.m, segment.k},
                                  thread, {m, 0});
        typename Mma::IteratorB b(typename Mma::IteratorB::Layout(p.ldb),
                                  reinterpret_cast<Element*>(const_cast<char*>(segment.b)), {segment.k, p.n}, thread,
                                  {0, n});
        Mma mma(shared.mainloop, thread, warp, lane);
        mma((segment.k + TileShape::kK - 1) / TileShape::kK, accumulators, a, b, accumulators);
      }

      typename Epilogue::OutputTileIterator c(typename Epilogue::OutputTileIterator::Params(RowMajor(p.ldc)),
                                              reinterpret_cast<ElementC*>(segment.c), {segment.m, p.n}, thread, {m, n});
      Epilogue epilogue(shared.epilogue, thread, warp, lane);
      epilogue(typename Epilogue::OutputOp({}), c, accumulators);

      if (thread == 0) shared.next_tile = next;
      __syncthreads();
      tile = static_cast<int64_t>(gridDim.x) + shared.next_tile;
    }
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) Entry(Params params) {
  extern __shared__ __align__(16) char storage[];
  Kernel::Run(params, *reinterpret_cast<typename Kernel::SharedStorage*>(storage));
}

// Blocks that fill the current device, asked once for each kernel and device.
template <typename Kernel>
cudaError_t GridSize(int* blocks) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (device < kDevices && (*blocks = known[device].load(std::memory_order_relaxed)) > 0) return cudaSuccess;
  constexpr int kShared = sizeof(typename Kernel::SharedStorage);
  int processors, blocks_each;
  if (cudaError_t error = cudaFuncSetAttribute(Entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      error != cudaSuccess) {
    return error;
  }
  if (cudaError_t error =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, Entry<Kernel>, Kernel::kThreads, kShared);
      error != cudaSuccess) {
    return error;
  }
  if (cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  if (blocks_each == 0) return cudaErrorLaunchOutOfResources;
  *blocks = blocks_each * processors;
  if (device < kDevices) known[device].store(*blocks, std::memory_order_relaxed);
  return cudaSuccess;
}

template <Layout layout, Dtype in, Dtype out, Math math, int alignment, int tile_m, int tile_n, int tile_k, int warp_m,
          int warp_n, int stages>
cudaError_t Launch(const GroupedProblem& problem, void* workspace, cudaStream_t stream) {
  using TileShape = cutlass::gemm::GemmShape<tile_m, tile_n, tile_k>;
  using Kernel =
      Grouped<layout, in, out, math, alignment, TileShape, cutlass::gemm::GemmShape<warp_m, warp_n, tile_k>, stages>;
  int blocks;
  if (cudaError_t error = GridSize<Kernel>(&blocks); error != cudaSuccess) return error;
  const Workspace w(problem, workspace);
  if (cudaError_t error = Fill(problem, w, TileShape::kM, stream); error != cudaSuccess) return error;
  const bool tgmm = layout == Layout::kTN;
  const Params params{
      .segments = w.segments,
      .tile_end = w.tile_end,
      .next_tile = w.next_tile,
      .count = w.count,
      .n = static_cast<int32_t>(problem.n),
      .tiles_m = static_cast<int32_t>(tgmm ? (problem.k + TileShape::kM - 1) / TileShape::kM : 0),
      .lda = problem.k,
      .ldb = layout == Layout::kNT ? problem.k : problem.n,
      .ldc = problem.n,
  };
  Entry<Kernel><<<blocks, Kernel::kThreads, sizeof(typename Kernel::SharedStorage), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jax_gg::cuda::sm80

#endif  // JAX_GG_CUDA_SM80_CUH_

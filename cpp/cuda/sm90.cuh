// Grouped GEMM for sm_90a: TMA, wgmma, warp specialisation, one launch that reads the group sizes itself.
//
//   gmm:   lhs[m, k] x rhs[g, k, n] -> out[m, n]      tiles of rows of one group; k is cut into steps of 64
//   tgmm:  lhs[m, k]^T x rhs[m, n] -> out[g, k, n]    tiles of one group's matrix; its rows are cut into steps of 64
//
// A block stays on its processor and takes tile after tile. Of its three warpgroups one feeds, and two compute: each
// its own tile, so that while one writes its result, the other keeps the tensor cores busy ("pingpong"); or each half
// of the rows of one larger tile ("cooperative"). One warp of the feeding warpgroup takes the next tile from a counter,
// finds the group it belongs to, and tells the others through a ring of tiles; another loads the operands through a
// ring of stages.
//
// TMA descriptors are made once on the host: they know addresses and shapes, not sizes. A group's rows end where its
// descriptor says nothing about, so rows are bounded by the trick of EncodeRagged: in gmm where a tile is stored, in
// tgmm where rows are loaded. What a gmm tile loads past its group belongs to other rows of the result, which are not
// stored.

#ifndef JAX_GG_CUDA_SM90_CUH_
#define JAX_GG_CUDA_SM90_CUH_

#include <algorithm>
#include <atomic>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "cuda/element.h"
#include "cuda/sm90.h"
#include "cuda/tensor_map.h"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

namespace jax_gg::cuda::sm90 {

using Barrier = cutlass::arch::ClusterBarrier;
using LoadBarrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kStepK = 64;                // 128 bytes of a row
constexpr int kChunk = 64 * 128;          // bytes: 64 rows of 128 bytes, what one TMA access moves
constexpr int kRing = 4;                  // tiles on their way from the warp that finds them
constexpr int kSharedBytes = 227 * 1024;  // that a block may have
constexpr int kOtherBytes = 7168;         // of them, for what is neither an operand nor a result

struct Params {
  const int32_t* group_sizes;
  const int32_t* group_offset;
  uint32_t* next_tile;
  int32_t batch;
  int32_t m, k, n;
  int32_t groups, weights;
  // From one problem to the next, 0 where all share it: entries of group_sizes and group_offset, rows of lhs, and rows
  // (tgmm) or matrices (gmm) of rhs.
  int32_t sizes_step, offset_step, lhs_step, rhs_step;
};

// One tile of the result and what it is computed from. Rows and weights are counted within its problem.
struct alignas(16) TileInfo {
  int32_t problem;
  int32_t row, col;    // of the result's matrix
  int32_t begin, end;  // rows of the group
  int32_t weight;
  int32_t steps;          // of kStepK; 0: nothing to multiply, the result is zero; negative: there are no more tiles
  uint32_t steps_before;  // of all tiles of this block before: tells stage and phase
};

// The part of the groups that tiles are looked up in.
template <int kWindow>
struct Window {
  int32_t begin[kWindow + 1];  // gmm: first row of each group and the end of the last; tgmm: first row
  int32_t last[kWindow];       // gmm: tiles along m up to and including this group; tgmm: rows
  int32_t order[kWindow];      // tgmm: groups in the order in which they are computed
};

__device__ inline int32_t ShuffleUpSum(int32_t value, int32_t cap) {
  // Sums that stop at cap, which 31 bits hold twice; such sums are associative.
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) {
      const uint32_t sum = static_cast<uint32_t>(value) + other;
      value = static_cast<int32_t>(sum < static_cast<uint32_t>(cap) ? sum : cap);
    }
  }
  return value;
}

// Turns tile numbers, which only grow, into tiles, those of a cluster into one. All lanes of one warp call it together.
// 32 bits hold the number of tiles: Launch has seen to it.
template <bool tgmm, int tile_m, int tile_n, int cluster, int kWindow>
struct Schedule {
  static_assert(kWindow <= 32 * 16);
  const Params& p;
  Window<kWindow>& w;
  // Rows of tiles that are visited together, column by column, to share what they read. Tiles that are computed at the
  // same time form about a square where rows of tiles share matrices; where each has its own, only rows can be shared,
  // and all tiles of a row are computed at the same time.
  static constexpr int32_t kMostStrip = 16, kLeastStrip = 4;
  int32_t strip = kMostStrip;
  int32_t first = 0;         // tile of the window
  int32_t tiles = 0;         // in the window
  int32_t problem = 0;       // that the window is part of
  int32_t window_begin = 0;  // gmm: group; tgmm: weight
  int32_t window_size = 0;
  int32_t next_group = 0;  // first that is not summed yet
  int32_t row = 0;         // where it begins
  int32_t offset;

  __device__ Schedule(const Params& p, Window<kWindow>& w) : p(p), w(w), offset(*p.group_offset) {}

  __device__ int32_t Entries() const { return tgmm ? p.weights : p.groups + 1; }
  __device__ int32_t TilesN() const { return (p.n + tile_n - 1) / tile_n; }
  __device__ int32_t TilesM() const { return (p.k + tile_m - 1) / tile_m; }  // tgmm

  // Sums the sizes of the next 32 groups; gives this lane's rows.
  __device__ void Sum32(int32_t& begin, int32_t& end) {
    const int lane = threadIdx.x % 32;
    const int32_t group = next_group + lane;
    int32_t size = group < p.groups ? p.group_sizes[int64_t{problem} * p.sizes_step + group] : 0;
    size = size < 0 ? 0 : size < p.m ? size : p.m;
    const int32_t sum = ShuffleUpSum(size, p.m);
    end = RowsEnd(row, sum, p.m);
    begin = __shfl_up_sync(0xffffffffu, end, 1);
    if (lane == 0) begin = row;
    row = __shfl_sync(0xffffffffu, end, 31);
    next_group += 32;
  }

  __device__ void LoadWindow() {
    const int lane = threadIdx.x % 32;
    const int32_t left = Entries() - window_begin;
    window_size = left < kWindow ? left : kWindow;
    if constexpr (tgmm) {
      for (int i = lane; i < window_size; i += 32) w.begin[i] = w.last[i] = 0, w.order[i] = i;
      __syncwarp();
      // 64 bits: the offset is any 32-bit number.
      const int64_t end_group = int64_t{window_begin} + window_size + offset;
      while (next_group < p.groups && next_group < end_group) {
        const int64_t i = int64_t{next_group} + lane - offset - window_begin;
        const int32_t rest = next_group + 32;
        int32_t begin, end;
        Sum32(begin, end);
        if (i >= 0 && i < window_size) {
          w.begin[i] = begin;
          w.last[i] = next_group - 32 + lane < p.groups ? end - begin : 0;
        }
        if (rest > end_group) {
          // The others of these 32 belong to the next window, which starts with them.
          row = __shfl_sync(0xffffffffu, begin, static_cast<int32_t>(end_group) - (rest - 32));
          next_group = static_cast<int32_t>(end_group);
        }
      }
      tiles = window_size * TilesM() * TilesN();
    } else {
      int32_t tiles_m = 0;
      for (int base = 0; base < window_size; base += 32) {
        int32_t begin, end;
        Sum32(begin, end);
        const int32_t group = window_begin + base + lane;
        if (group == p.groups) end = p.m;  // the rows past the sum
        int32_t count = group <= p.groups ? (end - begin + tile_m - 1) / tile_m : 0;
        count = ShuffleUpSum(count, INT32_MAX);
        if (base + lane < window_size) {
          w.begin[base + lane] = begin;
          w.begin[base + lane + 1] = end;
          w.last[base + lane] = tiles_m + count;
        }
        tiles_m += __shfl_sync(0xffffffffu, count, 31);
        __syncwarp();
      }
      tiles = tiles_m * TilesN();
      const int32_t at_once = gridDim.x / cluster / TilesN();
      strip = tiles_m >= 3 * window_size ? kMostStrip : max(kLeastStrip, min(kMostStrip, at_once));
    }
    __syncwarp();
  }

  // tgmm: most rows first, so that what is left for the end is short. By counting; `threads` threads call it together.
  __device__ void Order(int thread, int threads) {
    for (int i = thread; i < window_size; i += threads) {
      const int32_t rows = w.last[i];
      int rank = 0;
      for (int j = 0; j < window_size; ++j) rank += w.last[j] > rows || (w.last[j] == rows && j < i);
      w.order[rank] = i;
    }
  }

  __device__ bool Find(int32_t tile, TileInfo& info) {
    while (tile - first >= tiles) {
      first += tiles;
      window_begin += window_size;
      if (window_begin >= Entries()) {
        if (++problem >= p.batch) return false;
        window_begin = next_group = row = 0;
        offset = p.group_offset[int64_t{problem} * p.offset_step];
      }
      LoadWindow();
    }
    int32_t local = tile - first;
    int32_t slot = 0, rows_of_tiles;
    const int32_t tiles_n = TilesN();
    if constexpr (tgmm) {
      rows_of_tiles = TilesM();
      slot = local / (rows_of_tiles * tiles_n);
      local -= slot * rows_of_tiles * tiles_n;
    } else {
      rows_of_tiles = tiles / tiles_n;
    }
    const int32_t strip_row = local / (strip * tiles_n) * strip;
    const int32_t height = min(strip, rows_of_tiles - strip_row);
    const int32_t in_strip = local - strip_row * tiles_n;
    info.problem = problem;
    info.col = in_strip / height * tile_n;
    int32_t tile_row = strip_row + in_strip % height;
    if constexpr (tgmm) {
      const int32_t i = w.order[slot];
      info.row = tile_row * tile_m;
      info.begin = w.begin[i];
      info.end = info.begin + w.last[i];
      info.weight = window_begin + i;
      info.steps = (w.last[i] + kStepK - 1) / kStepK;
    } else {
      // The first group whose tiles end past this one: by parts of 16 groups, then in the part.
      const int lane = threadIdx.x % 32;
      const int32_t end_of_part = min(16 * lane + 15, window_size - 1);
      const int part = __ffs(__ballot_sync(0xffffffffu, w.last[end_of_part] > tile_row)) - 1;
      const int32_t candidate = min(16 * part + lane, window_size - 1);
      const int32_t i = 16 * part + __ffs(__ballot_sync(0xffffffffu, w.last[candidate] > tile_row)) - 1;
      if (i > 0) tile_row -= w.last[i - 1];
      const int32_t group = window_begin + i;
      const int64_t weight = group < p.groups ? WeightOfGroup(group, offset, p.weights) : -1;
      info.begin = w.begin[i];
      info.end = w.begin[i + 1];
      info.row = info.begin + tile_row * tile_m;
      info.weight = static_cast<int32_t>(weight);
      info.steps = weight >= 0 ? (p.k + kStepK - 1) / kStepK : 0;
    }
    return true;
  }
};

template <Layout layout, Dtype in, Dtype out, int tile_m, int tile_n, int stages, int cluster_m, int cluster_n,
          bool cooperative>
struct Grouped {
  using Element = typename ElementOf<in>::type;
  using ElementC = typename ElementOf<out>::type;
  static constexpr bool kTgmm = layout == Layout::kTN;
  static constexpr auto kMajorA = kTgmm ? cute::GMMA::Major::MN : cute::GMMA::Major::K;
  static constexpr auto kMajorB = layout == Layout::kNT ? cute::GMMA::Major::K : cute::GMMA::Major::MN;
  using AtomA =
      std::conditional_t<kTgmm, cute::GMMA::Layout_MN_SW128_Atom<Element>, cute::GMMA::Layout_K_SW128_Atom<Element>>;
  using AtomB = std::conditional_t<layout == Layout::kNT, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                   cute::GMMA::Layout_MN_SW128_Atom<Element>>;
  // Along k first, so that 64 of the contiguous dimension by all of k are one chunk, as TMA writes it.
  using SmemA =
      decltype(cute::tile_to_shape(AtomA{}, cute::Shape<cute::Int<tile_m>, cute::Int<kStepK>, cute::Int<stages>>{},
                                   cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using SmemB =
      decltype(cute::tile_to_shape(AtomB{}, cute::Shape<cute::Int<tile_n>, cute::Int<kStepK>, cute::Int<stages>>{},
                                   cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<tile_n>, cute::Int<kStepK>>,
                                 kMajorA, kMajorB>()));
  static constexpr int kBytesA = tile_m * 128, kBytesB = tile_n * 128, kOperandBytes = stages * (kBytesA + kBytesB);
  // Warpgroups that compute one tile, each its part of the rows.
  static constexpr int kSplit = cooperative ? 2 : 1;
  static constexpr int kRows = tile_m / kSplit;
  static constexpr int kCluster = cluster_m * cluster_n;
  static_assert(kCluster == 1 || kCluster == 2);
  // The operand that both blocks of a cluster need: each loads half of it, into the shared memory of both.
  static constexpr bool kShareA = cluster_n == 2, kShareB = cluster_m == 2;
  static constexpr uint16_t kBoth = 3;
  // Rows of one access: of a K-major operand all rows of the tile, of the other one chunk, or a half of that.
  static constexpr int kBoxA = (kTgmm ? 64 : tile_m) / cluster_n;
  static constexpr int kBoxB = (layout == Layout::kNT ? tile_n : 64) / cluster_m;
  static constexpr int kChunkColumns = 128 / sizeof(ElementC), kChunksOfRow = tile_n / kChunkColumns;
  static constexpr int kChunks = kRows / 64 * kChunksOfRow;  // that a warpgroup stores of a tile
  // Where both warpgroups end a tile together, nothing would keep the tensor cores busy while they store it. They round
  // it instead, which halves the registers that it takes, and store it in two parts during the first steps of the next.
  static constexpr bool kDefer = cooperative && sizeof(ElementC) == 2;
  static constexpr int kParts = 2;
  struct Rounded {
    uint32_t words[kDefer ? kChunks : 1][4][4];
  };
  // Between a warpgroup and its stores; and groups that are known to a block at a time. As many as there is room for.
  static constexpr int kBuffers = kOperandBytes + 6 * kChunk + kOtherBytes <= kSharedBytes ? 3 : 2;
  static constexpr int kWindow = kOperandBytes + 2 * kBuffers * kChunk + kOtherBytes <= kSharedBytes ? 512 : 128;

  // Tiles that are drawn before loading gets to them. More would leave too few for others at the end; but a tile of
  // tgmm can be shorter than the way of a number from memory.
  static constexpr int kAhead = kTgmm ? 2 : 1;

  struct alignas(1024) SharedStorage {
    alignas(1024) char a[stages][kBytesA];
    alignas(1024) char b[stages][kBytesB];
    alignas(1024) char c[2][kBuffers][kChunk];  // by warpgroup
    uint64_t full[stages], empty[stages];
    uint64_t ring_full[kRing], ring_empty[kRing];
    TileInfo ring[kRing];
    uint64_t wanted[kAhead];  // the loading warp has begun a tile: the number of a later one is drawn
    // Numbers of the next tiles, from the first block of a cluster to the second.
    uint64_t next_full[kAhead], next_empty[kAhead];
    uint32_t next[kAhead];
    uint64_t turn[2];  // of the computing warpgroups, where each has its own tiles
    Window<kWindow> window;
  };

  // The first warpgroup. One of its warps says what is computed, another loads it.
  __device__ static void Feed(const Params& p, const CUtensorMap& map_a, const CUtensorMap& map_b, SharedStorage& s,
                              uint32_t rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Schedule<kTgmm, cluster_m * tile_m, cluster_n * tile_n, kCluster, kWindow> schedule(p, s.window);
    if (warp == 0) schedule.LoadWindow();
    if constexpr (kTgmm) {
      schedule.window_size = min(p.weights, kWindow);
      cutlass::arch::NamedBarrier::sync(kWarpgroup, 2);
      schedule.Order(threadIdx.x, kWarpgroup);
      cutlass::arch::NamedBarrier::sync(kWarpgroup, 2);
    }
    if (warp == 0) FindTiles(p, schedule, s, rank);
    if (warp == 1 && lane == 0) LoadTiles(p, map_a, map_b, s, rank);
  }

  // Puts tile after tile into the ring, and after the last one, for each computing warpgroup, that there are no more.
  template <typename Tiles>
  __device__ static void FindTiles(const Params& p, Tiles& schedule, SharedStorage& s, uint32_t rank) {
    uint32_t steps = 0;
    int32_t tile = blockIdx.x / kCluster;
    for (int i = 0;; ++i) {
      TileInfo info;
      const bool found = schedule.Find(tile, info);
      if (!found) info.steps = -1;
      if constexpr (kShareB) info.row += static_cast<int32_t>(rank) * tile_m;
      if constexpr (kShareA) info.col += static_cast<int32_t>(rank) * tile_n;
      info.steps_before = steps;
      for (int told = 0; told < (found || cooperative ? 1 : 2); ++told) {
        const int slot = (i + told) % kRing;
        Barrier::wait(&s.ring_empty[slot], ((i + told) / kRing + 1) & 1);
        if (threadIdx.x % 32 == 0) {
          s.ring[slot] = info;
          Barrier::arrive(&s.ring_full[slot]);
        }
      }
      if (!found) break;
      steps += info.steps;
      uint32_t next = 0;
      if (threadIdx.x % 32 == 0) next = NextTile(p, s, rank, i);
      tile = gridDim.x / kCluster + __shfl_sync(0xffffffffu, next, 0);
    }
  }

  // The number of the tile after tile i of this block, counted from the first that no block begins with. In a cluster
  // the first block draws it, and gives it to the second.
  __device__ static uint32_t NextTile(const Params& p, SharedStorage& s, uint32_t rank, int i) {
    const int slot = i % kAhead, phase = i / kAhead & 1;
    if (kCluster == 2 && rank == 1) {
      LoadBarrier::arrive_and_expect_tx(&s.next_full[slot], sizeof(uint32_t));
      Barrier::wait(&s.next_full[slot], phase);
      const uint32_t next = *const_cast<volatile uint32_t*>(&s.next[slot]);
      Barrier::arrive(&s.next_empty[slot], 0u, 1u);
      return next;
    }
    // Of tile i + 1 - kAhead.
    Barrier::wait(&s.wanted[(i + 1) % kAhead], ((i + 1) / kAhead + 1) & 1);
    const uint32_t next = atomicAdd(p.next_tile, 1);
    if constexpr (kCluster == 2) {
      Barrier::wait(&s.next_empty[slot], phase ^ 1);
      cute::store_shared_remote(next, cute::cast_smem_ptr_to_uint(&s.next[slot]),
                                cute::cast_smem_ptr_to_uint(&s.next_full[slot]), 1);
    }
    return next;
  }

  // By one thread.
  __device__ static void LoadTiles(const Params& p, const CUtensorMap& map_a, const CUtensorMap& map_b,
                                   SharedStorage& s, uint32_t rank) {
    uint32_t stage = 0, phase = 1;
    for (int i = 0;; ++i) {
      const int slot = i % kRing;
      Barrier::wait(&s.ring_full[slot], i / kRing & 1);
      const TileInfo t = s.ring[slot];
      Barrier::arrive(&s.ring_empty[slot]);
      if (t.steps < 0) break;
      Barrier::arrive(&s.wanted[i % kAhead]);
      // A block whose part of the cluster's tile lies outside the result still loads its half of what both need.
      const bool used = IsUsed(p, t);
      const uint32_t bytes = (kShareA || used ? kBytesA : 0) + (kShareB || used ? kBytesB : 0);
      for (int j = 0; j < t.steps; ++j) {
        Barrier::wait(&s.empty[stage], phase);
        LoadBarrier::arrive_and_expect_tx(&s.full[stage], bytes);
        Load(p, map_a, map_b, s, stage, t, j * kStepK, used, rank);
        if (++stage == stages) stage = 0, phase ^= 1;
      }
    }
  }

  // Whether any of the tile lies in the result.
  __device__ static bool IsUsed(const Params& p, const TileInfo& t) {
    return t.row < (kTgmm ? p.k : t.end) && t.col < p.n;
  }

  __device__ static void Load(const Params& p, const CUtensorMap& map_a, const CUtensorMap& map_b, SharedStorage& s,
                              int stage, const TileInfo& t, int k, bool used, uint32_t rank) {
    char* const a = s.a[stage];
    char* const b = s.b[stage];
    uint64_t* const full = &s.full[stage];
    // The part that this block loads of an operand that it shares.
    const int part_a = kShareA ? static_cast<int>(rank) : 0, part_b = kShareB ? static_cast<int>(rank) : 0;
    if constexpr (kTgmm) {
      // Rows past the group's end read as zero in both operands: nothing there, NaN or not, reaches the sum.
      const int32_t bound = kRagged - (t.end - (t.begin + k));
      const int32_t end_a = t.problem * p.lhs_step + t.end, end_b = t.problem * p.rhs_step + t.end;
      if (kShareA || used) {
#pragma unroll
        for (int c = 0; c < tile_m / 64; ++c) {
          LoadRagged<kShareA>(map_a, full, a + c * kChunk + part_a * kBoxA * 128, t.row + 64 * c,
                              bound + part_a * kBoxA, end_a);
        }
      }
      if (kShareB || used) {
#pragma unroll
        for (int c = 0; c < tile_n / 64; ++c) {
          LoadRagged<kShareB>(map_b, full, b + c * kChunk + part_b * kBoxB * 128, t.col + 64 * c,
                              bound + part_b * kBoxB, end_b);
        }
      }
    } else {
      const int32_t row = t.problem * p.lhs_step + t.row, matrix = t.problem * p.rhs_step + t.weight;
      if (kShareA || used) {
        LoadMatrix<kShareA>(map_a, full, a + part_a * kBoxA * 128, k, row + part_a * kBoxA, 0);
      }
      if (kShareB || used) {
        if constexpr (layout == Layout::kNT) {
          LoadMatrix<kShareB>(map_b, full, b + part_b * kBoxB * 128, k, t.col + part_b * kBoxB, matrix);
        } else {
#pragma unroll
          for (int c = 0; c < tile_n / 64; ++c) {
            LoadMatrix<kShareB>(map_b, full, b + c * kChunk + part_b * kBoxB * 128, t.col + 64 * c, k + part_b * kBoxB,
                                matrix);
          }
        }
      }
    }
  }

  static constexpr auto kKeep = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

  template <bool both>
  __device__ static void LoadMatrix(const CUtensorMap& map, uint64_t* full, char* to, int32_t col, int32_t row,
                                    int32_t outer) {
    if constexpr (both) {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, full, kBoth, kKeep, to, col, row, outer);
    } else {
      cute::SM90_TMA_LOAD_3D::copy(&map, full, kKeep, to, col, row, outer);
    }
  }

  template <bool both>
  __device__ static void LoadRagged(const CUtensorMap& map, uint64_t* full, char* to, int32_t col, int32_t bound,
                                    int32_t end) {
    if constexpr (both) {
      cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&map, full, kBoth, kKeep, to, col, bound, +kRagged, end);
    } else {
      cute::SM90_TMA_LOAD_4D::copy(&map, full, kKeep, to, col, bound, +kRagged, end);
    }
  }

  // A computing warp is through with a stage; both blocks of a cluster write to it.
  __device__ static void Release(uint64_t* empty) {
    if (threadIdx.x % 32 != 0) return;
    if constexpr (kCluster == 2) {
      Barrier::arrive(empty, 0u, 1u);
      Barrier::arrive(empty, 1u, 1u);
    } else {
      Barrier::arrive(empty);
    }
  }

  __device__ static void Compute(const Params& p, const CUtensorMap& map_c, SharedStorage& s, int which) {
    using namespace cute;
    const int thread = threadIdx.x % kWarpgroup;
    const Tensor all_a = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(&s.a[0][0])), SmemA{});
    const Tensor a = local_tile(all_a, Shape<Int<kRows>, Int<kStepK>>{}, make_coord(cooperative ? which : 0, 0));
    const Tensor b = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(&s.b[0][0])), SmemB{});
    Mma mma;
    const auto slice = mma.get_slice(thread);
    const Tensor a_parts = slice.make_fragment_A(slice.partition_A(a));
    const Tensor b_parts = slice.make_fragment_B(slice.partition_B(b));
    Tensor sums = partition_fragment_C(mma, Shape<Int<kRows>, Int<tile_n>>{});
    int buffer = 0;
    // The tile before, rounded, and how many of its parts are still to be stored.
    Rounded rounded;
    TileInfo last;
    int pending = 0;

    for (int i = cooperative ? 0 : which;; i += cooperative ? 1 : 2) {
      const int slot = i % kRing;
      Barrier::wait(&s.ring_full[slot], (i / kRing) & 1);
      const TileInfo t = s.ring[slot];
      Barrier::arrive(&s.ring_empty[slot]);
      if (!kDefer && t.steps < 0) break;

      uint32_t stage = t.steps_before % stages, phase = t.steps_before / stages & 1;
      // A barrier tells phases apart by one bit. All loads before this tile's must have been seen to arrive by the
      // other warpgroup, or this one would take an earlier phase for its own.
      const int tiles_done = i / 2;
      if (!cooperative && i > 0) Barrier::wait(&s.turn[1 - which], (which == 0 ? tiles_done - 1 : tiles_done) & 1);
      if (kCluster == 2 && t.steps >= 0 && !IsUsed(p, t)) {
        for (int j = 0; j < t.steps; ++j) {
          LoadBarrier::wait(&s.full[stage], phase);
          Release(&s.empty[stage]);
          if (++stage == stages) stage = 0, phase ^= 1;
        }
        if (!cooperative && thread == 0) Barrier::arrive(&s.turn[which]);
        continue;
      }
      // Cleared here rather than by the first wgmma: the registers are then not live across the store before.
      clear(sums);
      uint32_t before = 0;
      for (int j = 0; j < t.steps; ++j) {
        LoadBarrier::wait(&s.full[stage], phase);
        warpgroup_fence_operand(sums);
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < size<2>(a_parts); ++k) {
          gemm(mma, a_parts(_, _, k, stage), b_parts(_, _, k, stage), sums);
        }
        warpgroup_commit_batch();
        if constexpr (kDefer) {
          if (pending > 0) StorePart(p, map_c, s.c[which], which, thread, last, rounded, pending--, buffer);
        }
        // All but this step are done, and the stage before can be filled again.
        warpgroup_wait<1>();
        warpgroup_fence_operand(sums);
        if (j > 0) Release(&s.empty[before]);
        before = stage;
        if (++stage == stages) stage = 0, phase ^= 1;
      }
      if (!cooperative && thread == 0) Barrier::arrive(&s.turn[which]);
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      if (t.steps > 0) Release(&s.empty[before]);

      if constexpr (kDefer) {
        while (pending > 0) StorePart(p, map_c, s.c[which], which, thread, last, rounded, pending--, buffer);
        if (t.steps < 0) break;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
          for (int pair = 0; pair < 4; ++pair) Round(sums, chunk, pair, rounded.words[chunk][pair]);
        }
        last = t;
        pending = kParts;
      } else {
        StoreChunks<0, kChunks>(p, map_c, s.c[which], which, thread, t, sums, buffer);
      }
    }
    if (thread == 0) tma_store_wait<0>();
  }

  // A store that the cache should not keep: it is needed for the operands, which many tiles read.
  __device__ static void StoreOnce(const CUtensorMap& map, const char* from, int32_t col, int32_t row, int32_t outer) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;\n" ::"l"(
            &map),
        "r"(cute::cast_smem_ptr_to_uint(from)), "r"(col), "r"(row), "r"(outer),
        "l"(static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST))
        : "memory");
  }

  // Rounds four 8 x 8 matrices of a chunk: rows 0 to 7 and 8 to 15 of the warp's 16, of two neighbouring groups of 8
  // columns.
  template <typename Sums>
  __device__ static void Round(const Sums& sums, int chunk, int pair, uint32_t (&words)[4]) {
    cutlass::NumericArrayConverter<ElementC, float, 8> convert;
    cutlass::Array<float, 8> values;
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      const int column = chunk % kChunksOfRow * 8 + 2 * pair + (v >> 2);
      values[v] = sums(cute::make_coord(v & 1, (v >> 1) & 1, column), chunk / kChunksOfRow, 0);
    }
    const auto rounded = convert(values);
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = reinterpret_cast<const uint32_t*>(&rounded)[w];
  }

  // Stores what is still to be stored of a tile, but for the last `pending - 1` parts.
  __device__ static void StorePart(const Params& p, const CUtensorMap& map_c, char (&buffers)[kBuffers][kChunk],
                                   int which, int thread, const TileInfo& t, const Rounded& rounded, int pending,
                                   int& buffer) {
    if (pending == 2) {
      StoreChunks<0, kChunks / 2>(p, map_c, buffers, which, thread, t, rounded, buffer);
    } else {
      StoreChunks<kChunks / 2, kChunks>(p, map_c, buffers, which, thread, t, rounded, buffer);
    }
  }

  // Writes chunks, 64 rows of 128 bytes each, of sums or of what has been rounded, through one of the buffers.
  template <int from, int to, typename Values>
  __device__ static void StoreChunks(const Params& p, const CUtensorMap& map_c, char (&buffers)[kBuffers][kChunk],
                                     int which, int thread, const TileInfo& t, const Values& values, int& buffer) {
    using namespace cute;
    const int warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int chunk = from; chunk < to; ++chunk) {
      const int row = t.row + (cooperative ? which * kRows : 0) + 64 * (chunk / kChunksOfRow);
      const int col = t.col + kChunkColumns * (chunk % kChunksOfRow);
      if (row >= (kTgmm ? p.k : t.end) || col >= p.n) continue;
      // The last store through this buffer has read it.
      if (thread == 0) tma_store_wait<kBuffers - 1>();
      cutlass::arch::NamedBarrier::sync(kWarpgroup, 3 + which);
      char* const c = buffers[buffer];
      if constexpr (sizeof(ElementC) == 2) {
        const int r = warp * 16 + lane % 16;
        const uint32_t address = cast_smem_ptr_to_uint(c + r * 128);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          uint32_t words[4];
          if constexpr (kDefer) {
#pragma unroll
            for (int w = 0; w < 4; ++w) words[w] = values.words[chunk][pair][w];
          } else {
            Round(values, chunk, pair, words);
          }
          const int part = 2 * pair + lane / 16;
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                           address + ((part ^ (r & 7)) << 4)),
                       "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                       : "memory");
        }
      } else {
#pragma unroll
        for (int group = 0; group < 4; ++group) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = warp * 16 + lane / 4 + 8 * half, part = 2 * group + lane % 4 / 2;
            const int column = chunk % kChunksOfRow * 4 + group, block = chunk / kChunksOfRow;
            *reinterpret_cast<float2*>(c + r * 128 + ((part ^ (r & 7)) << 4) + lane % 2 * 8) = make_float2(
                values(make_coord(0, half, column), block, 0), values(make_coord(1, half, column), block, 0));
          }
        }
      }
      tma_store_fence();
      cutlass::arch::NamedBarrier::sync(kWarpgroup, 3 + which);
      if (thread == 0) {
        if constexpr (kTgmm) {
          StoreOnce(map_c, c, col, row, t.problem * p.weights + t.weight);
        } else {
          SM90_TMA_STORE_4D::copy(&map_c, c, col, kRagged - (t.end - row), +kRagged, t.problem * p.m + t.end);
        }
        tma_store_arrive();
      }
      if (++buffer == kBuffers) buffer = 0;
    }
  }

  __device__ static void Run(const Params& p, const CUtensorMap& map_a, const CUtensorMap& map_b,
                             const CUtensorMap& map_c, SharedStorage& s) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < stages; ++i) {
        Barrier::init(&s.full[i], 1);
        Barrier::init(&s.empty[i], kCluster * kSplit * kWarpgroup / 32);
      }
      for (int i = 0; i < kRing; ++i) {
        Barrier::init(&s.ring_full[i], 1);
        Barrier::init(&s.ring_empty[i], kSplit * kWarpgroup + 1);
      }
      for (int i = 0; i < kAhead; ++i) {
        Barrier::init(&s.wanted[i], 1);
        Barrier::init(&s.next_full[i], 1);
        Barrier::init(&s.next_empty[i], 1);
      }
      Barrier::init(&s.turn[0], 1);
      Barrier::init(&s.turn[1], 1);
      cutlass::arch::fence_barrier_init();
      cute::prefetch_tma_descriptor(&map_a);
      cute::prefetch_tma_descriptor(&map_b);
      cute::prefetch_tma_descriptor(&map_c);
    }
    uint32_t rank = 0;
    if constexpr (kCluster == 2) {
      rank = cute::block_rank_in_cluster();
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }
    if (threadIdx.x < kWarpgroup) {
      cutlass::arch::warpgroup_reg_dealloc<40>();
      Feed(p, map_a, map_b, s, rank);
    } else {
      cutlass::arch::warpgroup_reg_alloc<232>();
      Compute(p, map_c, s, cutlass::canonical_warp_group_idx() - 1);
    }
    // The other block may still write to this one's barriers.
    if constexpr (kCluster == 2) {
      cute::cluster_arrive();
      cute::cluster_wait();
    }
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(kThreads, 1)
    Entry(Params params, const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
          const __grid_constant__ CUtensorMap map_c) {
  extern __shared__ __align__(1024) char storage[];
  Kernel::Run(params, map_a, map_b, map_c, *reinterpret_cast<typename Kernel::SharedStorage*>(storage));
}

template <Layout layout, Dtype in, Dtype out, int tile_m, int tile_n, int stages, int cluster_m, int cluster_n,
          bool cooperative>
cudaError_t Launch(const GroupedProblem& p, void* workspace, cudaStream_t stream) {
  using Kernel = Grouped<layout, in, out, tile_m, tile_n, stages, cluster_m, cluster_n, cooperative>;
  constexpr int kShared = sizeof(typename Kernel::SharedStorage);
  static_assert(kShared <= kSharedBytes);

  static std::atomic<int> processors_of[64];
  int device, processors = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (device < 64) processors = processors_of[device].load(std::memory_order_relaxed);
  if (processors == 0) {
    if (cudaError_t e = cudaFuncSetAttribute(Entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
        e != cudaSuccess) {
      return e;
    }
    if (cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device); e != cudaSuccess) {
      return e;
    }
    if (device < 64) processors_of[device].store(processors, std::memory_order_relaxed);
  }

  CUtensorMap a, b, c;
  cudaError_t error;
  if constexpr (layout == Layout::kTN) {
    if ((error = EncodeRagged(&a, p.in_dtype, p.lhs, p.k, Kernel::kBoxA)) != cudaSuccess) return error;
    if ((error = EncodeRagged(&b, p.in_dtype, p.rhs, p.n, Kernel::kBoxB)) != cudaSuccess) return error;
    error = EncodeMatrices(&c, p.out_dtype, p.out, p.batch * p.weights, p.k, p.n, 64);
  } else {
    const int64_t rows = (p.lhs_stride == 0 ? 1 : p.batch) * p.m;
    const int64_t matrices = (p.rhs_stride == 0 ? 1 : p.batch) * p.weights;
    if ((error = EncodeMatrices(&a, p.in_dtype, p.lhs, 1, rows, p.k, Kernel::kBoxA)) != cudaSuccess) return error;
    error = EncodeMatrices(&b, p.in_dtype, p.rhs, matrices, p.rhs_rows(), p.rhs_cols(), Kernel::kBoxB);
    if (error != cudaSuccess) return error;
    error = EncodeRagged(&c, p.out_dtype, p.out, p.n, 64);
  }
  if (error != cudaSuccess) return error;

  auto* next_tile = static_cast<uint32_t*>(workspace);
  if ((error = cudaMemsetAsync(next_tile, 0, sizeof(*next_tile), stream)) != cudaSuccess) return error;
  const Params params{
      .group_sizes = p.group_sizes,
      .group_offset = p.group_offset,
      .next_tile = next_tile,
      .batch = static_cast<int32_t>(p.batch),
      .m = static_cast<int32_t>(p.m),
      .k = static_cast<int32_t>(p.k),
      .n = static_cast<int32_t>(p.n),
      .groups = static_cast<int32_t>(p.groups),
      .weights = static_cast<int32_t>(p.weights),
      .sizes_step = static_cast<int32_t>(p.group_sizes_stride),
      .offset_step = static_cast<int32_t>(p.group_offset_stride),
      .lhs_step = static_cast<int32_t>(p.lhs_stride == 0 ? 0 : p.m),
      .rhs_step = static_cast<int32_t>(p.rhs_stride == 0       ? 0
                                       : p.mode == Mode::kTgmm ? p.m
                                                               : p.weights),
  };
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Kernel::kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(processors / Kernel::kCluster * Kernel::kCluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, Entry<Kernel>, params, a, b, c);
}

}  // namespace jax_gg::cuda::sm90

#endif  // JAX_GG_CUDA_SM90_CUH_

#include "cpu/grouped.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/gemm.h"

namespace jax_gg::cpu {
namespace {

// Part of the result. Either the product of these rows with one weight matrix (gmm), or the sum over these rows that is
// one weight matrix (tgmm), or, where there is nothing to multiply, zeros.
struct Piece {
  int64_t batch;
  int64_t begin, end;  // rows
  int64_t weight;      // -1 in gmm: rows that no weight of this call serves
};

// Pieces of one problem; together they cover its result exactly.
void AppendPieces(const GroupedProblem& p, int64_t batch, std::vector<Piece>& pieces) {
  const int32_t* sizes = p.group_sizes + batch * p.group_sizes_stride;
  const int32_t offset = p.group_offset[batch * p.group_offset_stride];
  if (p.mode == Mode::kTgmm) {
    for (int64_t w = 0; w < p.weights; ++w) {
      const int64_t group = w + offset;
      if (group < 0 || group >= p.groups) pieces.push_back({batch, 0, 0, w});
    }
  }
  int64_t begin = 0;
  for (int64_t group = 0; group < p.groups; ++group) {
    const int64_t end = RowsEnd(begin, sizes[group], p.m);
    const int64_t weight = WeightOfGroup(group, offset, p.weights);
    const bool in_result = p.mode == Mode::kGmm ? end > begin : weight >= 0;
    if (in_result) pieces.push_back({batch, begin, end, weight});
    begin = end;
  }
  if (p.mode == Mode::kGmm && begin < p.m) pieces.push_back({batch, begin, p.m, -1});
}

void Compute(const Executor& executor, const GroupedProblem& p, const Piece& piece) {
  const int64_t in_width = ByteWidth(p.in_dtype), out_width = ByteWidth(p.out_dtype);
  const int64_t rows = piece.end - piece.begin;
  const auto* lhs = static_cast<const char*>(p.lhs) + (piece.batch * p.lhs_stride + piece.begin * p.k) * in_width;
  const auto* rhs = static_cast<const char*>(p.rhs) + piece.batch * p.rhs_stride * in_width;
  auto* out = static_cast<char*>(p.out) + piece.batch * p.out_stride() * out_width;
  if (p.mode == Mode::kGmm) {
    out += piece.begin * p.n * out_width;
    if (piece.weight < 0 || p.k == 0) {
      std::memset(out, 0, rows * p.n * out_width);
      return;
    }
    rhs += piece.weight * p.k * p.n * in_width;
    Gemm(executor, p.in_dtype, p.out_dtype, rows, p.n, p.k, {lhs, p.k, false}, {rhs, p.rhs_cols(), p.transpose_rhs},
         out);
  } else {
    out += piece.weight * p.k * p.n * out_width;
    if (rows == 0) {
      std::memset(out, 0, p.k * p.n * out_width);
      return;
    }
    rhs += piece.begin * p.n * in_width;
    Gemm(executor, p.in_dtype, p.out_dtype, p.k, p.n, rows, {lhs, p.k, true}, {rhs, p.n, false}, out);
  }
}

// XLA hands out fresh memory for large results, and the first write to each of its 4 KiB pages traps into the kernel:
// for the weight gradients of 64 experts as long as the matmuls themselves. Asked in time, the kernel maps 2 MiB pages.
void PreferHugePages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  // Only advice: where the kernel does not take it, nothing changes.
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

void Grouped(const Executor& executor, const GroupedProblem& p) {
  if (p.n == 0 || (p.mode == Mode::kGmm ? p.m : p.k) == 0) return;  // No elements to write.

  PreferHugePages(p.out, p.batch * p.out_stride() * ByteWidth(p.out_dtype));

  std::vector<Piece> pieces;
  for (int64_t batch = 0; batch < p.batch; ++batch) AppendPieces(p, batch, pieces);

  // BLAS keeps a product this small on the thread that asked for it, so small pieces share the pool among themselves.
  // The others come after them, one at a time, each on all the threads that BLAS has.
  constexpr int64_t kSmall = 1 << 18;
  const auto large = std::stable_partition(pieces.begin(), pieces.end(), [&](const Piece& piece) {
    return static_cast<double>(piece.end - piece.begin) * p.k * p.n <= kSmall;
  });
  const int64_t small_count = large - pieces.begin();
  const int64_t tasks = std::min<int64_t>(small_count, 8 * executor.threads);
  const Executor alone{nullptr, 1};
  ParallelFor(executor, tasks, [&](int64_t task) {
    for (int64_t i = task * small_count / tasks; i < (task + 1) * small_count / tasks; ++i) {
      Compute(alone, p, pieces[i]);
    }
  });
  for (auto piece = large; piece != pieces.end(); ++piece) Compute(executor, p, *piece);
}

}  // namespace jax_gg::cpu

#include "cpu/grouped.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/blas.h"
#include "cpu/gemm.h"

namespace jax_gg::cpu {
namespace {

// Part of the result: a block of one product with one weight matrix (gmm), or of one weight matrix (tgmm); zeros where
// there is nothing to multiply.
struct Piece {
  int64_t batch = 0;
  int64_t weight = -1;        // -1 in gmm: rows that no weight of this call serves
  int64_t begin = 0;          // the group's first row
  int64_t inner = 0;          // products summed in each element
  int64_t row = 0, rows = 0;  // of out[b] (gmm), or of out[b, weight] (tgmm)
  int64_t col = 0, cols = 0;
};

// A piece is computed by one thread. Where it is cut depends on the problem alone, never on the threads, so neither do
// the bits of the result. Products of f32 this large lose nothing against larger ones, and the copies of one that are
// made where it must be converted take 2 MiB.
constexpr int64_t kPieceRows = 256, kPieceCols = 512;

// Smaller where that is what it takes to have enough pieces for many threads, or one of at most this cost.
constexpr int64_t kEnoughPieces = 64, kPieceCost = 1 << 25, kLeastRows = 64, kLeastCols = 64;

// What a piece of one element costs: its multiplications, plus writing it, in the same unit.
constexpr int64_t ElementCost(int64_t inner) { return inner + 16; }

class Pieces {
 public:
  explicit Pieces(const GroupedProblem& p) : p_(p) {
    // Of gmm and tgmm alike, if no row is left out.
    const double cost = static_cast<double>(p.batch) * p.m * p.n * ElementCost(p.k);
    most_cost_ = std::max(static_cast<double>(kPieceCost), cost / kEnoughPieces);
    for (int64_t batch = 0; batch < p.batch; ++batch) Append(batch);
  }

  std::vector<Piece> Take() && { return std::move(all_); }

 private:
  // Together they cover the result of one problem exactly.
  void Append(int64_t batch) {
    const int32_t* sizes = p_.group_sizes + batch * p_.group_sizes_stride;
    const int32_t offset = p_.group_offset[batch * p_.group_offset_stride];
    if (p_.mode == Mode::kTgmm) {
      for (int64_t w = 0; w < p_.weights; ++w) {
        const int64_t group = w + offset;
        if (group < 0 || group >= p_.groups) Cut({.batch = batch, .weight = w}, 0, p_.k);
      }
    }
    int64_t begin = 0;
    for (int64_t group = 0; group < p_.groups; ++group) {
      const int64_t end = RowsEnd(begin, sizes[group], p_.m);
      const int64_t weight = WeightOfGroup(group, offset, p_.weights);
      if (p_.mode == Mode::kGmm) {
        Cut({.batch = batch, .weight = weight, .begin = begin, .inner = weight < 0 ? 0 : p_.k}, begin, end);
      } else if (weight >= 0) {
        Cut({.batch = batch, .weight = weight, .begin = begin, .inner = end - begin}, 0, p_.k);
      }
      begin = end;
    }
    if (p_.mode == Mode::kGmm) Cut({.batch = batch, .weight = -1, .begin = begin}, begin, p_.m);
  }

  // Into pieces of limited size, all rows from `row` to `row_end` of the result.
  void Cut(Piece piece, int64_t row, int64_t row_end) {
    int64_t rows = std::min(kPieceRows, row_end - row), cols = std::min(kPieceCols, p_.n);
    while (static_cast<double>(rows) * cols * ElementCost(piece.inner) > most_cost_) {
      if (cols > std::max(rows, kLeastCols)) {
        cols = (cols + 1) / 2;
      } else if (rows > kLeastRows) {
        rows = (rows + 1) / 2;
      } else {
        break;
      }
    }
    for (; row < row_end; row += rows) {
      piece.row = row;
      piece.rows = std::min(rows, row_end - row);
      for (piece.col = 0; piece.col < p_.n; piece.col += cols) {
        piece.cols = std::min(cols, p_.n - piece.col);
        all_.push_back(piece);
      }
    }
  }

  const GroupedProblem& p_;
  double most_cost_;
  std::vector<Piece> all_;
};

void Compute(const GroupedProblem& p, const Piece& piece) {
  const int64_t in_width = ByteWidth(p.in_dtype), out_width = ByteWidth(p.out_dtype);
  const auto* lhs = static_cast<const char*>(p.lhs) + piece.batch * p.lhs_stride * in_width;
  const auto* rhs = static_cast<const char*>(p.rhs) + piece.batch * p.rhs_stride * in_width;
  auto* out = static_cast<char*>(p.out) + (piece.batch * p.out_stride() + piece.row * p.n + piece.col) * out_width;
  Operand a, b;
  if (p.mode == Mode::kGmm) {
    rhs += (piece.weight * p.k * p.n + piece.col * (p.transpose_rhs ? p.k : 1)) * in_width;
    a = {lhs + piece.row * p.k * in_width, p.k, false};
    b = {rhs, p.rhs_cols(), p.transpose_rhs};
  } else {
    out += piece.weight * p.k * p.n * out_width;
    a = {lhs + (piece.begin * p.k + piece.row) * in_width, p.k, true};
    b = {rhs + (piece.begin * p.n + piece.col) * in_width, p.n, false};
  }
  if (piece.inner > 0) {
    Gemm(p.in_dtype, p.out_dtype, piece.rows, piece.cols, piece.inner, a, b, out, p.n);
  } else {
    for (int64_t r = 0; r < piece.rows; ++r) std::memset(out + r * p.n * out_width, 0, piece.cols * out_width);
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

  const std::vector<Piece> pieces = Pieces(p).Take();

  // Consecutive pieces, enough of them to be worth waking a thread for.
  constexpr int64_t kTaskCost = 1 << 22;
  std::vector<size_t> ends{0};
  int64_t cost = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    cost += pieces[i].rows * pieces[i].cols * ElementCost(pieces[i].inner);
    if (cost >= kTaskCost || i + 1 == pieces.size()) {
      ends.push_back(i + 1);
      cost = 0;
    }
  }

  const OneThreadPerProduct one_thread;
  ParallelFor(executor, static_cast<int64_t>(ends.size()) - 1, [&](int64_t task) {
    for (size_t i = ends[task]; i < ends[task + 1]; ++i) Compute(p, pieces[i]);
  });
}

}  // namespace jax_gg::cpu

#include "cpu/gemm.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

#if defined(__SSE2__)
#include <pmmintrin.h>
#endif

#include "cpu/blas.h"
#include "cpu/convert.h"

namespace jax_gg::cpu {
namespace {

// Blocks of op(A), op(B) and C. A converted block is used once for every row (or column) of the block it multiplies,
// so large ones make conversion cheap; these keep the three in 8 MiB of f32.
constexpr int64_t kBlockM = 512, kBlockN = 2048, kBlockK = 512;

// Rows converted by one task: large enough to be worth waking a thread for.
constexpr int64_t kConvertElements = 1 << 16;

constexpr int64_t kBlasMax = std::numeric_limits<int>::max();

template <typename T>
struct Panel {
  const T* data;
  int64_t row_stride;
  bool transposed;
};

// XLA's threads round numbers below the normal range to zero, those of BLAS do not: unless both do the same, it depends
// on the thread what a row gives. While this lives, the calling thread keeps them too.
class KeepSubnormals {
 public:
#if defined(__SSE2__)
  KeepSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~(_MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON)); }
  ~KeepSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

template <typename T>
void CallBlas(int64_t m, int64_t n, int64_t k, Panel<T> a, Panel<T> b, bool accumulate, T* c, int64_t ldc) {
  // BLAS is column-major. Read that way, a row-major matrix is its own transpose, and C^T = op(B)^T op(A)^T.
  char trans_b = b.transposed ? 'T' : 'N', trans_a = a.transposed ? 'T' : 'N';
  int mm = static_cast<int>(n), nn = static_cast<int>(m), kk = static_cast<int>(k);
  int ldb = static_cast<int>(b.row_stride), lda = static_cast<int>(a.row_stride), ld = static_cast<int>(ldc);
  T one = 1, beta = accumulate ? 1 : 0;
  [[maybe_unused]] const KeepSubnormals keep;
  GemmOf(T{})(&trans_b, &trans_a, &mm, &nn, &kk, &one, const_cast<T*>(b.data), &ldb, const_cast<T*>(a.data), &lda,
              &beta, c, &ld);
}

template <typename From, typename T>
void ConvertRows(const Executor& executor, const From* from, int64_t row_stride, int64_t rows, int64_t cols, T* to) {
  const int64_t step = std::max<int64_t>(1, kConvertElements / cols);
  ParallelFor(executor, (rows + step - 1) / step, [=](int64_t task) {
    for (int64_t r = task * step, end = std::min(rows, r + step); r < end; ++r) {
      const From* source = from + r * row_stride;
      T* target = to + r * cols;
      for (int64_t c = 0; c < cols; ++c) target[c] = Load(source[c]);
    }
  });
}

template <typename T, typename To>
void StoreRows(const Executor& executor, const T* from, int64_t rows, int64_t cols, To* to, int64_t row_stride) {
  const int64_t step = std::max<int64_t>(1, kConvertElements / cols);
  ParallelFor(executor, (rows + step - 1) / step, [=](int64_t task) {
    for (int64_t r = task * step, end = std::min(rows, r + step); r < end; ++r) {
      const T* source = from + r * cols;
      To* target = to + r * row_stride;
      for (int64_t c = 0; c < cols; ++c) Store(source[c], target + c);
    }
  });
}

// The block of `rows` x `cols` of op(X) at (row, col), in BLAS's dtype; converted into `buffer` when it is not yet.
template <typename From, typename T>
Panel<T> Block(const Executor& executor, Operand x, int64_t row, int64_t col, int64_t rows, int64_t cols, T* buffer) {
  if (x.transposed) {
    std::swap(row, col);
    std::swap(rows, cols);
  }
  const From* from = static_cast<const From*>(x.data) + row * x.row_stride + col;
  if constexpr (std::is_same_v<From, T>) {
    if (x.row_stride <= kBlasMax) return {from, x.row_stride, x.transposed};
  }
  ConvertRows(executor, from, x.row_stride, rows, cols, buffer);
  return {buffer, cols, x.transposed};
}

template <typename From, typename T, typename To>
void Run(const Executor& executor, int64_t m, int64_t n, int64_t k, Operand a, Operand b, To* c) {
  constexpr bool kInPlace = std::is_same_v<From, T>, kIntoC = std::is_same_v<To, T>;
  if constexpr (kInPlace && kIntoC) {
    if (std::max({m, n, k, a.row_stride, b.row_stride}) <= kBlasMax) {
      CallBlas<T>(m, n, k, {static_cast<const T*>(a.data), a.row_stride, a.transposed},
                  {static_cast<const T*>(b.data), b.row_stride, b.transposed}, false, c, n);
      return;
    }
  }
  const int64_t bm = std::min(m, kBlockM), bn = std::min(n, kBlockN), bk = std::min(k, kBlockK);
  const auto a_block = std::make_unique_for_overwrite<T[]>(bm * bk);
  const auto b_block = std::make_unique_for_overwrite<T[]>(bk * bn);
  const auto c_block = std::make_unique_for_overwrite<T[]>(bm * bn);
  for (int64_t col = 0; col < n; col += bn) {
    const int64_t cols = std::min(bn, n - col);
    for (int64_t row = 0; row < m; row += bm) {
      const int64_t rows = std::min(bm, m - row);
      To* target = c + row * n + col;
      T* sum = c_block.get();
      int64_t sum_stride = cols;
      if constexpr (kIntoC) {
        if (n <= kBlasMax) {
          sum = target;
          sum_stride = n;
        }
      }
      for (int64_t inner = 0; inner < k; inner += bk) {
        const int64_t depth = std::min(bk, k - inner);
        CallBlas<T>(rows, cols, depth, Block<From>(executor, a, row, inner, rows, depth, a_block.get()),
                    Block<From>(executor, b, inner, col, depth, cols, b_block.get()), inner > 0, sum, sum_stride);
      }
      if (static_cast<const void*>(sum) != target) StoreRows(executor, sum, rows, cols, target, n);
    }
  }
}

template <typename From>
void RunFrom(const Executor& executor, Dtype out, int64_t m, int64_t n, int64_t k, Operand a, Operand b, void* c) {
  switch (out) {
    case Dtype::kF16:
      return Run<From, float>(executor, m, n, k, a, b, static_cast<F16*>(c));
    case Dtype::kBF16:
      return Run<From, float>(executor, m, n, k, a, b, static_cast<BF16*>(c));
    case Dtype::kF32:
      return Run<From, float>(executor, m, n, k, a, b, static_cast<float*>(c));
    case Dtype::kF64:
      return;  // Only from f64, below: GroupedProblem::Check.
  }
}

}  // namespace

void Gemm(const Executor& executor, Dtype in, Dtype out, int64_t m, int64_t n, int64_t k, Operand a, Operand b,
          void* c) {
  switch (in) {
    case Dtype::kF16:
      return RunFrom<F16>(executor, out, m, n, k, a, b, c);
    case Dtype::kBF16:
      return RunFrom<BF16>(executor, out, m, n, k, a, b, c);
    case Dtype::kF32:
      return RunFrom<float>(executor, out, m, n, k, a, b, c);
    case Dtype::kF64:
      return Run<double, double>(executor, m, n, k, a, b, static_cast<double*>(c));
  }
}

}  // namespace jax_gg::cpu

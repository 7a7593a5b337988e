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

// The inner dimension of a converted block.
constexpr int64_t kBlockK = 512;

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
constexpr bool InPlace(const Operand& x) {
  return std::is_same_v<From, T> && x.row_stride <= kBlasMax;
}

// The block of `rows` x `cols` of op(X) at (row, col), in BLAS's dtype; copied into `buffer` where it must be.
template <typename From, typename T>
Panel<T> Block(Operand x, int64_t row, int64_t col, int64_t rows, int64_t cols, T* buffer) {
  if (x.transposed) {
    std::swap(row, col);
    std::swap(rows, cols);
  }
  const From* from = static_cast<const From*>(x.data) + row * x.row_stride + col;
  if constexpr (std::is_same_v<From, T>) {
    if (InPlace<From, T>(x)) return {from, x.row_stride, x.transposed};
  }
  for (int64_t r = 0; r < rows; ++r) {
    const From* source = from + r * x.row_stride;
    T* target = buffer + r * cols;
    for (int64_t c = 0; c < cols; ++c) target[c] = Load(source[c]);
  }
  return {buffer, cols, x.transposed};
}

template <typename From, typename T, typename To>
void Run(int64_t m, int64_t n, int64_t k, Operand a, Operand b, To* c, int64_t c_row_stride) {
  const bool a_in_place = InPlace<From, T>(a), b_in_place = InPlace<From, T>(b);
  const int64_t bk = std::min(k, a_in_place && b_in_place ? kBlasMax : kBlockK);
  const auto a_block = std::make_unique_for_overwrite<T[]>(a_in_place ? 0 : m * bk);
  const auto b_block = std::make_unique_for_overwrite<T[]>(b_in_place ? 0 : bk * n);
  std::unique_ptr<T[]> c_block;
  T* sum = nullptr;
  int64_t sum_stride = n;
  if constexpr (std::is_same_v<To, T>) {
    if (c_row_stride <= kBlasMax) {
      sum = c;
      sum_stride = c_row_stride;
    }
  }
  if (sum == nullptr) {
    c_block = std::make_unique_for_overwrite<T[]>(m * n);
    sum = c_block.get();
  }
  for (int64_t inner = 0; inner < k; inner += bk) {
    const int64_t depth = std::min(bk, k - inner);
    CallBlas<T>(m, n, depth, Block<From>(a, 0, inner, m, depth, a_block.get()),
                Block<From>(b, inner, 0, depth, n, b_block.get()), inner > 0, sum, sum_stride);
  }
  if (c_block == nullptr) return;
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t col = 0; col < n; ++col) Store(sum[row * n + col], c + row * c_row_stride + col);
  }
}

template <typename From>
void RunFrom(Dtype out, int64_t m, int64_t n, int64_t k, Operand a, Operand b, void* c, int64_t c_row_stride) {
  switch (out) {
    case Dtype::kF16:
      return Run<From, float>(m, n, k, a, b, static_cast<F16*>(c), c_row_stride);
    case Dtype::kBF16:
      return Run<From, float>(m, n, k, a, b, static_cast<BF16*>(c), c_row_stride);
    case Dtype::kF32:
      return Run<From, float>(m, n, k, a, b, static_cast<float*>(c), c_row_stride);
    case Dtype::kF64:
      return;  // Only from f64, below: GroupedProblem::Check.
  }
}

}  // namespace

void Gemm(Dtype in, Dtype out, int64_t m, int64_t n, int64_t k, Operand a, Operand b, void* c, int64_t c_row_stride) {
  switch (in) {
    case Dtype::kF16:
      return RunFrom<F16>(out, m, n, k, a, b, c, c_row_stride);
    case Dtype::kBF16:
      return RunFrom<BF16>(out, m, n, k, a, b, c, c_row_stride);
    case Dtype::kF32:
      return RunFrom<float>(out, m, n, k, a, b, c, c_row_stride);
    case Dtype::kF64:
      return Run<double, double>(m, n, k, a, b, static_cast<double*>(c), c_row_stride);
  }
}

}  // namespace jax_gg::cpu

// The grouped matmul as both backends see it, and the row arithmetic they share.
//
//   gmm:   lhs[b, m, k] x rhs[b, g, k, n]   -> out[b, m, n]      one matrix of rhs for each group of rows
//   tgmm:  lhs[b, m, k]^T x rhs[b, m, n]    -> out[b, g, k, n]   one sum over the rows of each group
//
// b counts independent problems of one call (what vmap maps over; 1 without vmap). An operand that all problems share
// has a leading dimension of 1 and a batch stride of 0. group_sizes[b, groups] cuts the m rows of each problem into
// consecutive ranges. rhs (in tgmm: out) holds the `weights` groups from group_offset on: weight w serves group
// group_offset + w.

#ifndef JAX_GG_PROBLEM_H_
#define JAX_GG_PROBLEM_H_

#include <cstdint>
#include <string>

#if defined(__CUDACC__)
#define JAX_GG_HOST_DEVICE __host__ __device__
#else
#define JAX_GG_HOST_DEVICE
#endif

namespace jax_gg {

enum class Mode { kGmm, kTgmm };
enum class Dtype { kF16, kBF16, kF32, kF64 };

// The order of jax.lax.Precision. It decides how f32 operands are multiplied where hardware offers a choice.
enum class Precision : int32_t { kDefault = 0, kHigh = 1, kHighest = 2 };

JAX_GG_HOST_DEVICE constexpr int64_t ByteWidth(Dtype dtype) {
  return dtype == Dtype::kF64 ? 8 : dtype == Dtype::kF32 ? 4 : 2;
}

const char* Name(Dtype dtype);

struct GroupedProblem {
  Mode mode;
  Dtype in_dtype;      // of lhs and rhs
  Dtype out_dtype;     // of the result; accumulation is in f32, for f64 operands in f64
  bool transpose_rhs;  // gmm only: rhs is [b, g, n, k]
  Precision precision;

  int64_t batch;    // b
  int64_t m, k, n;  // m counts the rows of one problem
  int64_t groups;   // entries of group_sizes of one problem
  int64_t weights;  // g: matrices in rhs (gmm) or in out (tgmm) of one problem

  const void* lhs;
  const void* rhs;
  const int32_t* group_sizes;
  const int32_t* group_offset;
  void* out;

  // Elements from one problem to the next; 0 where all problems share the operand.
  int64_t lhs_stride, rhs_stride, group_sizes_stride, group_offset_stride;

  JAX_GG_HOST_DEVICE int64_t rhs_rows() const { return mode == Mode::kTgmm ? m : transpose_rhs ? n : k; }
  JAX_GG_HOST_DEVICE int64_t rhs_cols() const { return mode == Mode::kGmm && transpose_rhs ? k : n; }
  JAX_GG_HOST_DEVICE int64_t out_stride() const { return mode == Mode::kGmm ? m * n : weights * k * n; }

  // Device memory that the arguments of the kernels may take: a header, and so much for each group and each weight.
  static constexpr int64_t kWorkspaceHeaderBytes = 256, kWorkspaceBytesPerEntry = 48;
  static int64_t WorkspaceBytes(int64_t batch, int64_t groups, int64_t weights) {
    const int64_t entries = batch * (groups + 1 > weights ? groups + 1 : weights);
    return kWorkspaceHeaderBytes + entries * kWorkspaceBytesPerEntry;
  }

  // Empty when the invariants hold, otherwise one line that says which does not.
  std::string Check() const;
  std::string ToString() const;
};

// Where the next group of rows begins, given where this one does. Sizes are data: a negative one counts as 0, and what
// overruns m is cut at m, so that no value of `size` leads outside the rows.
JAX_GG_HOST_DEVICE inline int64_t RowsEnd(int64_t begin, int32_t size, int64_t m) {
  const int64_t end = begin + (size > 0 ? static_cast<int64_t>(size) : 0);
  return end < m ? end : m;
}

// The weight that serves a group, or -1 when this call does not hold it (its rows come out zero).
JAX_GG_HOST_DEVICE inline int64_t WeightOfGroup(int64_t group, int32_t group_offset, int64_t weights) {
  const int64_t weight = group - group_offset;
  return weight >= 0 && weight < weights ? weight : -1;
}

}  // namespace jax_gg

#endif  // JAX_GG_PROBLEM_H_

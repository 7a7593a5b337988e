#include "problem.h"

#include <sstream>

namespace jax_gg {

const char* Name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF16:
      return "f16";
    case Dtype::kBF16:
      return "bf16";
    case Dtype::kF32:
      return "f32";
    case Dtype::kF64:
      return "f64";
  }
  return "?";
}

namespace {

// Whether `factors` multiply to a byte count that 64 bits hold.
bool Addressable(std::initializer_list<int64_t> factors) {
  int64_t product = 8;
  for (int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return false;
  }
  return true;
}

}  // namespace

std::string GroupedProblem::Check() const {
  if (batch < 0 || m < 0 || k < 0 || n < 0 || groups < 0 || weights < 0) {
    return "jax_gg: negative dimension in " + ToString();
  }
  if ((in_dtype == Dtype::kF64) != (out_dtype == Dtype::kF64)) {
    return "jax_gg: f64 operands give f64 results and no others do, in " + ToString();
  }
  if (mode == Mode::kTgmm && transpose_rhs) {
    return "jax_gg: tgmm has no transpose_rhs, in " + ToString();
  }
  if (!Addressable({batch, m, k}) || !Addressable({batch, m, n}) || !Addressable({batch, weights, k, n})) {
    return "jax_gg: an operand is larger than 2^63 bytes in " + ToString();
  }
  return {};
}

std::string GroupedProblem::ToString() const {
  std::ostringstream s;
  s << (mode == Mode::kGmm ? "gmm" : "tgmm") << "(m=" << m << ", k=" << k << ", n=" << n << ", g=" << weights
    << ", group_sizes=" << groups << ", batch=" << batch << ", " << Name(in_dtype) << " -> " << Name(out_dtype)
    << (transpose_rhs ? ", transpose_rhs" : "") << ")";
  return s.str();
}

}  // namespace jax_gg

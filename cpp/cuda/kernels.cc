#include "cuda/kernels.h"

#include <sstream>

#include "cuda/sm80.h"

namespace jax_gg::cuda {
namespace {

#define JAX_GG_SM80(rate, layout, in, out, math, alignment, m, n, k, warp_m, warp_n, stages) \
  Kernel{                                                                                    \
      "sm80",                                                                                \
      80,                                                                                    \
      Layout::layout,                                                                        \
      Dtype::in,                                                                             \
      Dtype::out,                                                                            \
      Math::math,                                                                            \
      alignment,                                                                             \
      {m, n, k, stages},                                                                     \
      rate,                                                                                  \
      &sm80::Launch<Layout::layout, Dtype::in, Dtype::out, Math::math, alignment, m, n, k, warp_m, warp_n, stages>},
constexpr Kernel kKernels[] = {
#include "sm80_kernels.inc"
};
#undef JAX_GG_SM80

}  // namespace

std::span<const Kernel> Kernels() { return kKernels; }

std::string Kernel::Name() const {
  std::ostringstream s;
  s << family << "_" << tile.m << "x" << tile.n << "x" << tile.k << "x" << tile.stages << "_a" << alignment;
  return s.str();
}

std::string Kernel::Operands() const {
  const char* operation = layout == Layout::kTN ? "tgmm " : layout == Layout::kNT ? "gmm transpose_rhs " : "gmm ";
  const char* accuracy = math == Math::kTf32 ? " (TF32)" : "";
  return std::string(operation) + jax_gg::Name(in) + " -> " + jax_gg::Name(out) + accuracy;
}

}  // namespace jax_gg::cuda

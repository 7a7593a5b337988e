#include "cuda/kernels.h"

#include <cstdint>
#include <limits>
#include <sstream>

#include "cuda/sm80.h"
#include "cuda/sm90.h"

namespace jax_gg::cuda {
namespace {

constexpr int kAny = std::numeric_limits<int>::max();
constexpr int64_t kAny64 = std::numeric_limits<int64_t>::max();

#define JAX_GG_SM80(rate_, layout_, in_, out_, math_, alignment_, m, n, k, warp_m, warp_n, stages)                   \
  Kernel{.family = "sm80",                                                                                           \
         .min_arch = 80,                                                                                             \
         .max_arch = kAny,                                                                                           \
         .layout = Layout::layout_,                                                                                  \
         .in = Dtype::in_,                                                                                           \
         .out = Dtype::out_,                                                                                         \
         .math = Math::math_,                                                                                        \
         .alignment = alignment_,                                                                                    \
         .tile = {m, n, k, stages, 1, 1},                                                                            \
         .rate = rate_,                                                                                              \
         .max_rows = kAny64,                                                                                         \
         .max_tiles = kAny64,                                                                                        \
         .launch = &sm80::Launch<Layout::layout_, Dtype::in_, Dtype::out_, Math::math_, alignment_, m, n, k, warp_m, \
                                 warp_n, stages>},

#define JAX_GG_SM90(rate_, layout_, in_, out_, m, n, stages, cluster_m, cluster_n, cooperative) \
  Kernel{                                                                                       \
      .family = "sm90",                                                                         \
      .min_arch = 90,                                                                           \
      .max_arch = 90,                                                                           \
      .layout = Layout::layout_,                                                                \
      .in = Dtype::in_,                                                                         \
      .out = Dtype::out_,                                                                       \
      .math = Math::kTensor,                                                                    \
      .alignment = 8,                                                                           \
      .tile = {m, n, 64, stages, cluster_m, cluster_n},                                         \
      .rate = rate_,                                                                            \
      .max_rows = 1 << 30,                                                                      \
      .max_tiles = INT32_MAX - (1 << 16),                                                       \
      .launch =                                                                                 \
          &sm90::Launch<Layout::layout_, Dtype::in_, Dtype::out_, m, n, stages, cluster_m, cluster_n, cooperative>},

constexpr Kernel kKernels[] = {
#include "sm80_kernels.inc"
#include "sm90_kernels.inc"
};
#undef JAX_GG_SM80
#undef JAX_GG_SM90

}  // namespace

std::span<const Kernel> Kernels() { return kKernels; }

std::string Kernel::Name() const {
  std::ostringstream s;
  s << family << "_" << tile.m << "x" << tile.n << "x" << tile.k << "x" << tile.stages;
  if (tile.cluster_m * tile.cluster_n > 1) s << "_c" << tile.cluster_m << "x" << tile.cluster_n;
  s << "_a" << alignment;
  return s.str();
}

std::string Kernel::Operands() const {
  const char* operation = layout == Layout::kTN ? "tgmm " : layout == Layout::kNT ? "gmm transpose_rhs " : "gmm ";
  const char* accuracy = math == Math::kTf32 ? " (TF32)" : "";
  return std::string(operation) + jax_gg::Name(in) + " -> " + jax_gg::Name(out) + accuracy;
}

}  // namespace jax_gg::cuda

// The CUTLASS type of a dtype.

#ifndef JAX_GG_CUDA_ELEMENT_H_
#define JAX_GG_CUDA_ELEMENT_H_

#include "cutlass/numeric_types.h"
#include "problem.h"

namespace jax_gg::cuda {

template <Dtype dtype>
struct ElementOf;
template <>
struct ElementOf<Dtype::kF16> {
  using type = cutlass::half_t;
};
template <>
struct ElementOf<Dtype::kBF16> {
  using type = cutlass::bfloat16_t;
};
template <>
struct ElementOf<Dtype::kF32> {
  using type = float;
};

}  // namespace jax_gg::cuda

#endif  // JAX_GG_CUDA_ELEMENT_H_

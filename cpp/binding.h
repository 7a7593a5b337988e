// What the FFI handlers of every backend share: one binding, and the step from XLA's buffers to a GroupedProblem.
//
// Operands: lhs, rhs, group_sizes (s32), group_offset (s32), each with a leading batch dimension of 1 or b.
// Results: out, and a workspace of GroupedProblem::WorkspaceBytes(), which a backend may need and XLA can then plan
// for. Attributes: transpose_rhs (bool), precision (int32, the value of jax.lax.Precision), kernel (string: a prefix of
// the names of the kernels to choose from; empty for all).

#ifndef JAX_GG_BINDING_H_
#define JAX_GG_BINDING_H_

#include <string_view>
#include <utility>

#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_gg {

// Appends the operands, result and attributes to a binding that already holds the backend's own context arguments.
template <typename Binding>
auto BindGrouped(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<xla::ffi::AnyBuffer>()              // lhs
      .template Arg<xla::ffi::AnyBuffer>()              // rhs
      .template Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // group_sizes
      .template Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // group_offset
      .template Ret<xla::ffi::AnyBuffer>()              // out
      .template Ret<xla::ffi::Buffer<xla::ffi::U8>>()   // workspace
      .template Attr<bool>("transpose_rhs")
      .template Attr<int32_t>("precision")
      .template Attr<std::string_view>("kernel");
}

// Reads shapes and dtypes only, never the contents of a buffer: on a GPU they may not exist yet.
xla::ffi::ErrorOr<GroupedProblem> MakeProblem(Mode mode, xla::ffi::AnyBuffer lhs, xla::ffi::AnyBuffer rhs,
                                              xla::ffi::Buffer<xla::ffi::S32> group_sizes,
                                              xla::ffi::Buffer<xla::ffi::S32> group_offset,
                                              xla::ffi::Result<xla::ffi::AnyBuffer> out,
                                              xla::ffi::Result<xla::ffi::Buffer<xla::ffi::U8>> workspace,
                                              bool transpose_rhs, int32_t precision);

}  // namespace jax_gg

#endif  // JAX_GG_BINDING_H_

#include "binding.h"

#include <optional>

namespace jax_gg {
namespace {

namespace ffi = xla::ffi;

std::optional<Dtype> ToDtype(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F16:
      return Dtype::kF16;
    case ffi::BF16:
      return Dtype::kBF16;
    case ffi::F32:
      return Dtype::kF32;
    case ffi::F64:
      return Dtype::kF64;
    default:
      return std::nullopt;
  }
}

ffi::Unexpected<ffi::Error> Invalid(std::string message) {
  return ffi::Unexpected<ffi::Error>(ffi::Error::InvalidArgument(std::move(message)));
}

}  // namespace

ffi::ErrorOr<GroupedProblem> MakeProblem(Mode mode, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                         ffi::Buffer<ffi::S32> group_sizes, ffi::Buffer<ffi::S32> group_offset,
                                         ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::U8>> workspace,
                                         bool transpose_rhs, int32_t precision) {
  // Python checks what users pass; this guards programs that call the target by other means, such as an exported
  // module edited by hand.
  const auto l = lhs.dimensions(), r = rhs.dimensions(), s = group_sizes.dimensions(), o = group_offset.dimensions(),
             d = out->dimensions();
  const bool gmm = mode == Mode::kGmm;
  if (l.size() != 3 || r.size() != (gmm ? 4 : 3) || s.size() != 2 || o.size() != 1 || d.size() != (gmm ? 3 : 4)) {
    return Invalid("jax_gg: operand of the wrong rank");
  }
  const auto in = ToDtype(lhs.element_type()), out_dtype = ToDtype(out->element_type());
  if (!in || !out_dtype || rhs.element_type() != lhs.element_type()) {
    return Invalid("jax_gg: operands of an unsupported dtype, or of two dtypes");
  }

  GroupedProblem p{};
  p.mode = mode;
  p.in_dtype = *in;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = transpose_rhs;
  p.precision = static_cast<Precision>(precision);
  p.batch = d[0];
  p.m = l[1];
  p.k = l[2];
  p.n = d[d.size() - 1];
  p.groups = s[1];
  p.weights = gmm ? r[1] : d[1];
  p.lhs = lhs.untyped_data();
  p.rhs = rhs.untyped_data();
  p.group_sizes = group_sizes.typed_data();
  p.group_offset = group_offset.typed_data();
  p.out = out->untyped_data();

  // The stride of an operand whose leading dimension is `dim`, if that dimension is 1 or b.
  bool batches_agree = true;
  auto stride = [&](int64_t dim, int64_t elements) -> int64_t {
    batches_agree = batches_agree && (dim == 1 || dim == p.batch);
    return dim == 1 ? 0 : elements;
  };
  p.lhs_stride = stride(l[0], p.m * p.k);
  p.rhs_stride = stride(r[0], (gmm ? p.weights : 1) * p.rhs_rows() * p.rhs_cols());
  p.group_sizes_stride = stride(s[0], p.groups);
  p.group_offset_stride = stride(o[0], 1);

  const bool shapes_agree =
      r[r.size() - 2] == p.rhs_rows() && r[r.size() - 1] == p.rhs_cols() && d[d.size() - 2] == (gmm ? p.m : p.k);
  if (!batches_agree || !shapes_agree) return Invalid("jax_gg: operand shapes do not agree in " + p.ToString());
  if (static_cast<int64_t>(workspace->element_count()) < GroupedProblem::WorkspaceBytes(p.batch, p.groups, p.weights)) {
    return Invalid("jax_gg: workspace of " + std::to_string(workspace->element_count()) + " bytes is too small for " +
                   p.ToString());
  }
  if (std::string error = p.Check(); !error.empty()) return Invalid(std::move(error));
  return p;
}

}  // namespace jax_gg

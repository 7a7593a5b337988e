// The seam to XLA on the CPU.

#include "cpu/handlers.h"

#include <new>

#include "binding.h"
#include "cpu/grouped.h"

namespace jax_gg::cpu {
namespace {

namespace ffi = xla::ffi;

template <Mode mode>
ffi::Error Run(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::Buffer<ffi::S32> group_sizes,
               ffi::Buffer<ffi::S32> group_offset, ffi::Result<ffi::AnyBuffer> out,
               ffi::Result<ffi::Buffer<ffi::U8>> workspace, bool transpose_rhs, int32_t precision, std::string_view) {
  ffi::ErrorOr<GroupedProblem> problem =
      MakeProblem(mode, lhs, rhs, group_sizes, group_offset, out, workspace, transpose_rhs, precision);
  if (problem.has_error()) return problem.error();
  const Executor executor{[&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }, pool.num_threads()};
  try {
    Grouped(executor, *problem);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "jax_gg: out of memory for temporaries in " + problem->ToString());
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxGgCpuGmm, Run<Mode::kGmm>, BindGrouped(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxGgCpuTgmm, Run<Mode::kTgmm>, BindGrouped(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace jax_gg::cpu

// The CUDA handlers of a build without CUDA: registered all the same, so that a program on a GPU says what is missing.

#include "cuda/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_gg::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error Run(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "jax_gg: this build has no CUDA kernels; install it where a CUDA compiler (nvcc) is found, or run "
                    "on the CPU with JAX_PLATFORMS=cpu");
}

}  // namespace

std::string BuiltFor() { return {}; }
std::vector<std::string> KernelNames() { return {}; }
std::optional<DeviceNumbers> CurrentDeviceNumbers() { return std::nullopt; }
std::pair<std::string, std::string> ExplainChoice(const GroupedProblem&, const DeviceNumbers&, std::string_view) {
  return {};
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxGgCudaGmm, Run, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxGgCudaTgmm, Run, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace jax_gg::cuda

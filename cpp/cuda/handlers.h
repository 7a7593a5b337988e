#ifndef JAX_GG_CUDA_HANDLERS_H_
#define JAX_GG_CUDA_HANDLERS_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "problem.h"
#include "xla/ffi/api/c_api.h"

extern "C" {
// In a build without CUDA they return an error that says so.
XLA_FFI_Error* JaxGgCudaGmm(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxGgCudaTgmm(XLA_FFI_CallFrame* call_frame);
}

namespace jax_gg::cuda {

// What the kernels of this build were compiled for, such as "sm_80, sm_90, PTX of sm_80"; empty in a build without
// CUDA.
std::string BuiltFor();

// What the choice of a kernel depends on: compute capability (10 * major + minor), processors, and the bytes of shared
// memory that a block may have. Of the current device; nothing without one, or in a build without CUDA.
struct DeviceNumbers {
  int arch, processors, shared_bytes;
};
std::optional<DeviceNumbers> CurrentDeviceNumbers();

// The name of the kernel that a problem would be served by, empty if by none, and a text that says why, as in select.h.
// Operands are taken to be aligned as well as XLA aligns them. Both are empty in a build without CUDA.
std::pair<std::string, std::string> ExplainChoice(const GroupedProblem& problem, const DeviceNumbers& device,
                                                  std::string_view prefix);

// The kernel table, a line for each, such as "gmm bf16 -> f32: sm80_128x256x32x3_a8".
std::vector<std::string> KernelNames();

}  // namespace jax_gg::cuda

#endif  // JAX_GG_CUDA_HANDLERS_H_

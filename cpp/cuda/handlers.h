#ifndef JAX_GG_CUDA_HANDLERS_H_
#define JAX_GG_CUDA_HANDLERS_H_

#include <string>
#include <vector>

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

// The kernel table, a line for each, such as "gmm bf16 -> f32: sm80_128x256x32x3_a8".
std::vector<std::string> KernelNames();

}  // namespace jax_gg::cuda

#endif  // JAX_GG_CUDA_HANDLERS_H_

#ifndef JAX_GG_CPU_HANDLERS_H_
#define JAX_GG_CPU_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* JaxGgCpuGmm(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxGgCpuTgmm(XLA_FFI_CallFrame* call_frame);
}

#endif  // JAX_GG_CPU_HANDLERS_H_

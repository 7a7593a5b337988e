// Which kernel serves a problem: a pure function of the problem and the device, over the table in kernels.h.

#ifndef JAX_GG_CUDA_SELECT_H_
#define JAX_GG_CUDA_SELECT_H_

#include <string>
#include <string_view>

#include "cuda/kernels.h"

namespace jax_gg::cuda {

struct Device {
  int arch;  // compute capability, 10 * major + minor
  int processors;
  int shared_bytes;  // that a block may have
};

// The kernel, or null and one line of why there is none. `prefix` limits the choice to kernels whose name starts so.
const Kernel* Select(const GroupedProblem& problem, const Device& device, std::string_view prefix, std::string* why);

}  // namespace jax_gg::cuda

#endif  // JAX_GG_CUDA_SELECT_H_

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

struct Explanation {
  std::string kernel;  // its name; empty if there is none
  // The problem and its kernel, then a line for each kernel that multiplies such operands: why it cannot serve, or how
  // much longer it is expected to take. If there is none, one line that says why.
  std::string text;
};

// Select for a person.
Explanation Explain(const GroupedProblem& problem, const Device& device, std::string_view prefix);

}  // namespace jax_gg::cuda

#endif  // JAX_GG_CUDA_SELECT_H_

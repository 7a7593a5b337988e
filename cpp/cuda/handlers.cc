// The seam to XLA on CUDA. Everything here runs when XLA captures a CUDA graph, not when it replays it: it may look at
// shapes, dtypes and addresses, never at what a buffer holds.

#include "cuda/handlers.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "binding.h"
#include "cuda/select.h"

namespace jax_gg::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error CudaError(cudaError_t error, const GroupedProblem& problem) {
  return ffi::Error::Internal(std::string("jax_gg: ") + cudaGetErrorString(error) + " in " + problem.ToString());
}

cudaError_t Describe(int id, Device* device) {
  int major, minor;
  for (auto [value, attribute] :
       {std::pair{&major, cudaDevAttrComputeCapabilityMajor}, std::pair{&minor, cudaDevAttrComputeCapabilityMinor},
        std::pair{&device->processors, cudaDevAttrMultiProcessorCount},
        std::pair{&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin}}) {
    if (cudaError_t error = cudaDeviceGetAttribute(value, attribute, id); error != cudaSuccess) return error;
  }
  device->arch = 10 * major + minor;
  return cudaSuccess;
}

// The current device, which XLA sets before it calls, asked for its properties once.
cudaError_t CurrentDevice(Device* device) {
  constexpr int kDevices = 64;
  static std::array<Device, kDevices> known;
  static std::array<std::atomic<bool>, kDevices> is_known;
  static std::mutex mutex;
  int id;
  if (cudaError_t error = cudaGetDevice(&id); error != cudaSuccess) return error;
  if (id >= kDevices) return Describe(id, device);
  if (!is_known[id].load(std::memory_order_acquire)) {
    std::lock_guard lock(mutex);
    if (cudaError_t error = Describe(id, &known[id]); error != cudaSuccess) return error;
    is_known[id].store(true, std::memory_order_release);
  }
  *device = known[id];
  return cudaSuccess;
}

template <Mode mode>
ffi::Error Run(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::Buffer<ffi::S32> group_sizes,
               ffi::Buffer<ffi::S32> group_offset, ffi::Result<ffi::AnyBuffer> out,
               ffi::Result<ffi::Buffer<ffi::U8>> workspace, bool transpose_rhs, int32_t precision,
               std::string_view kernel_prefix) {
  ffi::ErrorOr<GroupedProblem> problem =
      MakeProblem(mode, lhs, rhs, group_sizes, group_offset, out, workspace, transpose_rhs, precision);
  if (problem.has_error()) return problem.error();
  if (out->element_count() == 0) return ffi::Error::Success();

  Device device;
  if (cudaError_t error = CurrentDevice(&device); error != cudaSuccess) return CudaError(error, *problem);
  std::string why;
  const Kernel* kernel = Select(*problem, device, kernel_prefix, &why);
  if (kernel == nullptr) return ffi::Error(ffi::ErrorCode::kUnimplemented, "jax_gg: " + why);
  const cudaError_t error = kernel->launch(*problem, workspace->typed_data(), stream);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "jax_gg: built for " + BuiltFor() + ", found compute capability " +
                          std::to_string(device.arch / 10) + "." + std::to_string(device.arch % 10) + " (" +
                          cudaGetErrorString(error) +
                          "); build jax_gg on this machine, or run on the CPU with JAX_PLATFORMS=cpu");
  }
  return error == cudaSuccess ? ffi::Error::Success() : CudaError(error, *problem);
}

}  // namespace

std::string BuiltFor() { return JAX_GG_CUDA_BUILT_FOR; }

std::vector<std::string> KernelNames() {
  std::vector<std::string> names;
  for (const Kernel& kernel : Kernels()) names.push_back(kernel.Operands() + ": " + kernel.Name());
  return names;
}

std::optional<DeviceNumbers> CurrentDeviceNumbers() {
  Device device;
  if (CurrentDevice(&device) != cudaSuccess) return std::nullopt;
  return DeviceNumbers{device.arch, device.processors, device.shared_bytes};
}

std::pair<std::string, std::string> ExplainChoice(const GroupedProblem& problem, const DeviceNumbers& device,
                                                  std::string_view prefix) {
  Explanation explanation = Explain(problem, {device.arch, device.processors, device.shared_bytes}, prefix);
  return {std::move(explanation.kernel), std::move(explanation.text)};
}

#define JAX_GG_BINDING BindGrouped(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>())
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxGgCudaGmm, Run<Mode::kGmm>, JAX_GG_BINDING, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxGgCudaTgmm, Run<Mode::kTgmm>, JAX_GG_BINDING, {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_gg::cuda

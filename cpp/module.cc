// The Python module: FFI handlers as capsules, and the BLAS that the CPU backend calls.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#if __has_include(<dlfcn.h>)
#include <dlfcn.h>
#endif

#include "cpu/blas.h"
#include "cpu/handlers.h"
#include "cuda/handlers.h"
#include "problem.h"

namespace nb = nanobind;

namespace {

nb::capsule Handler(XLA_FFI_Error* (*function)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(function));
}

// A function of scipy.linalg.cython_blas. The capsule's name is its C signature: a build of SciPy with 64-bit integers
// would say so there, and is refused here rather than called wrongly.
void* BlasFunction(nb::handle capi, const char* name) {
  nb::object capsule = capi[name];
  const char* signature = PyCapsule_GetName(capsule.ptr());
  if (signature == nullptr || std::strncmp(signature, "void (char *, char *, int *, int *, int *, ", 43) != 0) {
    throw nb::import_error(
        "jax_gg: scipy.linalg.cython_blas has an unexpected signature for gemm; expected 32-bit "
        "integer arguments");
  }
  return PyCapsule_GetPointer(capsule.ptr(), signature);
}

// The functions of that same library, if it is an OpenBLAS, that say how many threads share a product. They have the
// prefix of the wheels on PyPI, or none.
void FindBlasThreads(const std::string& path, jax_gg::cpu::Blas& blas) {
#if __has_include(<dlfcn.h>)
  // Never closed: Python has it open as well.
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return;
  for (const std::string prefix : {"scipy_", ""}) {
    void* get = dlsym(library, (prefix + "openblas_get_num_threads").c_str());
    void* set = dlsym(library, (prefix + "openblas_set_num_threads").c_str());
    if (get == nullptr || set == nullptr) continue;
    blas.get_num_threads = reinterpret_cast<int (*)()>(get);
    blas.set_num_threads = reinterpret_cast<void (*)(int)>(set);
    return;
  }
#else
  (void)path, (void)blas;
#endif
}

jax_gg::Dtype ToDtype(std::string_view name) {
  using jax_gg::Dtype;
  for (Dtype dtype : {Dtype::kF16, Dtype::kBF16, Dtype::kF32, Dtype::kF64}) {
    if (name == jax_gg::Name(dtype)) return dtype;
  }
  throw std::invalid_argument("dtype: got " + std::string(name) + ", expected f16, bf16, f32 or f64");
}

using Numbers = std::tuple<int, int, int>;

std::optional<Numbers> CudaDevice() {
  const auto device = jax_gg::cuda::CurrentDeviceNumbers();
  if (!device) return std::nullopt;
  return Numbers{device->arch, device->processors, device->shared_bytes};
}

std::pair<std::string, std::string> CudaChoice(Numbers device, bool tgmm, std::string_view in, std::string_view out,
                                               bool transpose_rhs, int precision, int64_t batch, int64_t m, int64_t k,
                                               int64_t n, int64_t groups, int64_t weights, std::string_view prefix) {
  jax_gg::GroupedProblem p{};
  p.mode = tgmm ? jax_gg::Mode::kTgmm : jax_gg::Mode::kGmm;
  p.in_dtype = ToDtype(in);
  p.out_dtype = ToDtype(out);
  p.transpose_rhs = transpose_rhs;
  p.precision = static_cast<jax_gg::Precision>(precision);
  p.batch = batch, p.m = m, p.k = k, p.n = n, p.groups = groups, p.weights = weights;
  const auto [arch, processors, shared_bytes] = device;
  return jax_gg::cuda::ExplainChoice(p, {arch, processors, shared_bytes}, prefix);
}

}  // namespace

NB_MODULE(_jax_gg, module) {
  nb::object scipy = nb::module_::import_("scipy.linalg.cython_blas"), capi = scipy.attr("__pyx_capi__");
  auto& blas = jax_gg::cpu::TheBlas();
  blas.sgemm = reinterpret_cast<jax_gg::cpu::GemmFunction<float>*>(BlasFunction(capi, "sgemm"));
  blas.dgemm = reinterpret_cast<jax_gg::cpu::GemmFunction<double>*>(BlasFunction(capi, "dgemm"));
  FindBlasThreads(nb::cast<std::string>(scipy.attr("__file__")), blas);

  module.def(
      "registrations",
      [] {
        nb::dict cpu;
        cpu["jax_gg_gmm"] = Handler(JaxGgCpuGmm);
        cpu["jax_gg_tgmm"] = Handler(JaxGgCpuTgmm);
        nb::dict cuda;
        cuda["jax_gg_gmm"] = Handler(JaxGgCudaGmm);
        cuda["jax_gg_tgmm"] = Handler(JaxGgCudaTgmm);
        nb::dict all;
        all["cpu"] = cpu;
        all["CUDA"] = cuda;
        return all;
      },
      nb::sig("def registrations() -> dict[str, dict[str, typing.Any]]"),
      "FFI handlers: platform -> target -> capsule. Those of CUDA return an error in a build without it.");
  module.def("cuda_built_for", &jax_gg::cuda::BuiltFor,
             "What the CUDA kernels were compiled for; empty in a build without CUDA.");
  module.def("cuda_kernels", &jax_gg::cuda::KernelNames, "One line for each CUDA kernel: operands and name.");
  module.def(
      "cuda_device", &CudaDevice,
      "Compute capability (10 * major + minor), processors and shared memory of a block in bytes, of the current "
      "GPU; None without one.");
  module.def("cuda_choice", &CudaChoice, nb::arg("device"), nb::arg("tgmm"), nb::arg("in_dtype"), nb::arg("out_dtype"),
             nb::arg("transpose_rhs"), nb::arg("precision"), nb::arg("batch"), nb::arg("m"), nb::arg("k"), nb::arg("n"),
             nb::arg("groups"), nb::arg("weights"), nb::arg("prefix"),
             "The kernel that a call would use, empty for none, and why.");
  module.def("workspace_bytes", &jax_gg::GroupedProblem::WorkspaceBytes, nb::arg("batch"), nb::arg("groups"),
             nb::arg("weights"), "Bytes of the workspace result that the handlers expect.");
}

#include "cuda/select.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <sstream>

namespace jax_gg::cuda {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The widest alignment, in elements, that the strides and the pointers of a problem allow.
int Alignment(const GroupedProblem& p) {
  const auto bits = static_cast<uint64_t>(p.k | p.n);
  const auto in = reinterpret_cast<uintptr_t>(p.lhs) | reinterpret_cast<uintptr_t>(p.rhs);
  const auto out = reinterpret_cast<uintptr_t>(p.out);
  int alignment = 1;
  while (alignment < 16 / ByteWidth(p.in_dtype) && bits % (2 * alignment) == 0 &&
         in % (2 * alignment * ByteWidth(p.in_dtype)) == 0 &&
         out % std::min<int64_t>(16, 2 * alignment * ByteWidth(p.out_dtype)) == 0) {
    alignment *= 2;
  }
  return alignment;
}

// A relative time: that of a tile, by as many as each processor computes. Group sizes are on the device, so rows are
// taken to be spread evenly; the last tile of a group is then on average half full.
double Cost(const Kernel& kernel, const GroupedProblem& p, const Device& device) {
  const Tile& t = kernel.tile;
  double tiles = static_cast<double>(CeilDiv(p.n, t.n)) * p.batch;
  if (p.mode == Mode::kTgmm) {
    tiles *= static_cast<double>(p.weights * CeilDiv(p.k, t.m));
  } else {
    const double groups = std::max<double>(1, std::min(p.weights, p.groups));
    tiles *= groups * std::max(1.0, p.m / groups / t.m + 0.5);
  }
  return std::max(1.0, tiles / device.processors) * t.m * t.n / kernel.rate;
}

}  // namespace

const Kernel* Select(const GroupedProblem& p, const Device& device, std::string_view prefix, std::string* why) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() - 4096;
  if (p.k > kMax || p.n > kMax || p.batch * (p.groups + 1) > kMax || p.batch * p.weights > kMax) {
    *why = "k, n or the number of groups is beyond 2^31 in " + p.ToString();
    return nullptr;
  }
  const Layout layout = p.mode == Mode::kTgmm ? Layout::kTN : p.transpose_rhs ? Layout::kNT : Layout::kNN;
  const Math math = p.in_dtype != Dtype::kF32            ? Math::kTensor
                    : p.precision == Precision::kDefault ? Math::kTf32
                                                         : Math::kF32;
  const int alignment = Alignment(p);
  const Kernel* best = nullptr;
  double best_cost = 0;
  for (const Kernel& kernel : Kernels()) {
    if (kernel.min_arch > device.arch || kernel.max_arch < device.arch || kernel.max_batch < p.batch ||
        kernel.max_rows < p.m || kernel.layout != layout || kernel.in != p.in_dtype || kernel.out != p.out_dtype ||
        kernel.math != math || alignment % kernel.alignment != 0 ||
        kernel.tile.SharedBytes(kernel.in) > device.shared_bytes ||
        (!prefix.empty() && !kernel.Name().starts_with(prefix))) {
      continue;
    }
    const double cost = Cost(kernel, p, device);
    // Wider accesses first: the kernels for lower alignments are far slower.
    const int wider = best == nullptr ? 1 : kernel.alignment - best->alignment;
    if (wider > 0 || (wider == 0 && cost < best_cost)) {
      best = &kernel;
      best_cost = cost;
    }
  }
  if (best == nullptr) {
    std::ostringstream s;
    s << "no kernel" << (prefix.empty() ? "" : " named ") << prefix << " for " << p.ToString()
      << " on compute capability " << device.arch / 10 << "." << device.arch % 10;
    if (device.arch < 80) s << ", expected 8.0 or newer";
    if (p.in_dtype == Dtype::kF64) s << ", expected float16, bfloat16 or float32";
    *why = s.str();
  }
  return best;
}

}  // namespace jax_gg::cuda

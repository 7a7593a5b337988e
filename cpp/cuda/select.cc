#include "cuda/select.h"

#include <algorithm>
#include <cstdint>
#include <iomanip>
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

Layout LayoutOf(const GroupedProblem& p) {
  return p.mode == Mode::kTgmm ? Layout::kTN : p.transpose_rhs ? Layout::kNT : Layout::kNN;
}

Math MathOf(const GroupedProblem& p) {
  if (p.in_dtype != Dtype::kF32) return Math::kTensor;
  return p.precision == Precision::kDefault ? Math::kTf32 : Math::kF32;
}

bool IsFor(const Kernel& kernel, const GroupedProblem& p) {
  return kernel.layout == LayoutOf(p) && kernel.in == p.in_dtype && kernel.out == p.out_dtype &&
         kernel.math == MathOf(p);
}

// Tiles of the result of all groups, at most.
int64_t MostTiles(const Tile& tile, const GroupedProblem& p) {
  const int64_t per_column =
      p.mode == Mode::kTgmm ? p.weights * CeilDiv(p.k, tile.m) : p.groups + 1 + CeilDiv(p.m, tile.m);
  return p.batch * per_column * CeilDiv(p.n, tile.n);
}

// Why a kernel for these operands cannot serve the problem; null if it can.
const char* WhyNot(const Kernel& kernel, const GroupedProblem& p, int alignment, const Device& device,
                   std::string_view prefix) {
  if (!prefix.empty() && !kernel.Name().starts_with(prefix)) return "excluded by the argument `kernel`";
  if (device.arch < kernel.min_arch) return "needs a newer GPU";
  if (device.arch > kernel.max_arch) return "needs an older GPU";
  if (kernel.tile.SharedBytes(kernel.in) > device.shared_bytes) return "needs more shared memory";
  if (alignment % kernel.alignment != 0) return "needs other multiples of k and n, or better aligned operands";
  if (p.batch * p.m > kernel.max_rows) return "too many rows";
  if (MostTiles(kernel.tile, p) > kernel.max_tiles) return "too many tiles";
  return nullptr;
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

std::string ToString(const Device& device) {
  return "compute capability " + std::to_string(device.arch / 10) + "." + std::to_string(device.arch % 10);
}

// Empty, or what is too large for every kernel.
std::string TooLarge(const GroupedProblem& p) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() - 4096;
  if (p.m <= kMax + 4096 && p.k <= kMax && p.n <= kMax && p.batch * (p.groups + 1) <= kMax &&
      p.batch * p.weights <= kMax)
    return {};
  return "m, k, n or the number of groups is beyond 2^31 in " + p.ToString();
}

}  // namespace

const Kernel* Select(const GroupedProblem& p, const Device& device, std::string_view prefix, std::string* why) {
  if (*why = TooLarge(p); !why->empty()) return nullptr;
  const int alignment = Alignment(p);
  const Kernel* best = nullptr;
  double best_cost = 0;
  for (const Kernel& kernel : Kernels()) {
    if (!IsFor(kernel, p) || WhyNot(kernel, p, alignment, device, prefix) != nullptr) continue;
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
    s << "no kernel" << (prefix.empty() ? "" : " named ") << prefix << " for " << p.ToString() << " on "
      << ToString(device);
    if (device.arch < 80) s << ", expected 8.0 or newer";
    if (p.in_dtype == Dtype::kF64) s << ", expected float16, bfloat16 or float32";
    *why = s.str();
  }
  return best;
}

Explanation Explain(const GroupedProblem& p, const Device& device, std::string_view prefix) {
  std::string why;
  const Kernel* best = Select(p, device, prefix, &why);
  if (best == nullptr) return {{}, why};
  const int alignment = Alignment(p);
  const double least = Cost(*best, p, device);
  size_t width = 0;
  for (const Kernel& kernel : Kernels()) width = std::max(width, kernel.Name().size());
  std::ostringstream s;
  s << p.ToString() << " on " << ToString(device) << " with " << device.processors << " processors: " << best->Name();
  for (const Kernel& kernel : Kernels()) {
    if (!IsFor(kernel, p)) continue;
    s << "\n  " << std::left << std::setw(static_cast<int>(width)) << kernel.Name() << "  ";
    if (const char* reason = WhyNot(kernel, p, alignment, device, prefix)) {
      s << reason;
    } else if (kernel.alignment < best->alignment) {
      s << "slower: narrower accesses";
    } else if (&kernel == best) {
      s << "chosen";
    } else {
      s << "expected to take " << std::fixed << std::setprecision(2) << Cost(kernel, p, device) / least
        << " times as long";
    }
  }
  return {best->Name(), s.str()};
}

}  // namespace jax_gg::cuda

#include "cuda/tensor_map.h"

#include <algorithm>

namespace jax_gg::cuda {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

// The driver's function, asked for through the runtime: linking libcuda would keep the module from loading where there
// is no driver.
EncodeFunction Encode() {
  static const EncodeFunction function = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeFunction>(address)
                                                                        : nullptr;
  }();
  return function;
}

CUtensorMapDataType Type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case Dtype::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

template <int rank>
cudaError_t Tiled(CUtensorMap* map, Dtype dtype, const void* data, const cuuint64_t (&dims)[rank],
                  const cuuint64_t (&strides)[rank - 1], int box_rows) {
  if (Encode() == nullptr) return cudaErrorNotSupported;
  cuuint32_t box[rank], steps[rank];
  std::fill(box, box + rank, 1);
  std::fill(steps, steps + rank, 1);
  box[0] = static_cast<cuuint32_t>(128 / ByteWidth(dtype));
  box[1] = static_cast<cuuint32_t>(box_rows);
  const CUresult result = Encode()(map, Type(dtype), rank, const_cast<void*>(data), dims, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t EncodeMatrices(CUtensorMap* map, Dtype dtype, const void* data, int64_t outer, int64_t rows, int64_t cols,
                           int box_rows) {
  const auto row_bytes = static_cast<cuuint64_t>(cols * ByteWidth(dtype));
  // A dimension of 0 cannot be encoded; nothing is read through it then.
  const auto at_least_1 = [](int64_t x) { return static_cast<cuuint64_t>(std::max<int64_t>(x, 1)); };
  return Tiled<3>(map, dtype, data, {at_least_1(cols), at_least_1(rows), at_least_1(outer)},
                  {std::max<cuuint64_t>(row_bytes, 16), std::max<cuuint64_t>(row_bytes * at_least_1(rows), 16)},
                  box_rows);
}

cudaError_t EncodeRagged(CUtensorMap* map, Dtype dtype, const void* data, int64_t cols, int box_rows) {
  const auto row_bytes = std::max<cuuint64_t>(static_cast<cuuint64_t>(cols * ByteWidth(dtype)), 16);
  constexpr auto kExtent = static_cast<cuuint64_t>(kRagged);
  return Tiled<4>(map, dtype, data,
                  {std::max<cuuint64_t>(static_cast<cuuint64_t>(cols), 1), kExtent, 2 * kExtent, 2 * kExtent},
                  {row_bytes, (cuuint64_t{1} << 34) - row_bytes, row_bytes}, box_rows);
}

}  // namespace jax_gg::cuda

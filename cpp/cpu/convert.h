// Conversions between the dtypes of operands and the one they accumulate in, written without branches on data so that
// compilers vectorise them for any x86-64 or AArch64, and in integers where subnormals matter, because XLA runs its
// threads with subnormals flushed to zero.

#ifndef JAX_GG_CPU_CONVERT_H_
#define JAX_GG_CPU_CONVERT_H_

#include <cstdint>
#include <cstring>

namespace jax_gg::cpu {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float Load(float x) { return x; }
inline double Load(double x) { return x; }
inline float Load(BF16 x) { return FloatOf(static_cast<uint32_t>(x.bits) << 16); }

inline float Load(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t exponent = magnitude >> 10;
  // A subnormal is its fraction times 2^-24. Anything else moves to f32's place with the difference of the exponent
  // biases, 127 - 15, added; infinities and NaNs twice, so that 31 becomes 255.
  const uint32_t subnormal = BitsOf(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + (112u << 23) + (exponent == 31 ? 112u << 23 : 0u);
  return FloatOf(sign | (exponent == 0 ? subnormal : normal));
}

// Store: round to nearest, ties to even; NaN stays NaN.

inline void Store(float x, float* to) { *to = x; }
inline void Store(double x, double* to) { *to = x; }

inline void Store(float x, BF16* to) {
  const uint32_t bits = BitsOf(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  to->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

inline void Store(float x, F16* to) {
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14 the result is subnormal, a multiple of 2^-24. Adding 1/2 to the value leaves just those bits in the
  // sum's fraction, rounded by the addition itself. What flushing takes away there is far below 2^-24.
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  // 0x477ff000 is 65520, halfway between the largest f16 and what would come after it.
  to->bits = static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite));
}

}  // namespace jax_gg::cpu

#endif  // JAX_GG_CPU_CONVERT_H_

// The arithmetic of all operators, for host and device: dtypes, rounding, products and sums.
//
// Arithmetic is fp32, and each product and each sum is rounded before it is used again (compile
// with contraction off). Narrowing rounds to nearest even as PyTorch does, including infinities,
// subnormals and signed zeros. A NaN stays a NaN; its payload is undefined (PyTorch's depends on
// the CPU). Branch-free on the host, so that loops vectorize.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define POPLAR_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define POPLAR_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace poplar {

struct BFloat16 {
  std::uint16_t bits;
};

struct Half {
  std::uint16_t bits;
};

POPLAR_HOST_DEVICE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

POPLAR_HOST_DEVICE float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `holds ? yes : no` by masks. Compilers turn the operator into a branch, which prevents
// vectorization.
POPLAR_HOST_DEVICE std::uint32_t chosen(bool holds, std::uint32_t yes, std::uint32_t no) {
  const std::uint32_t mask = -static_cast<std::uint32_t>(holds);
  return no ^ ((no ^ yes) & mask);
}

POPLAR_HOST_DEVICE float widen(float value) { return value; }

POPLAR_HOST_DEVICE float widen(BFloat16 value) {
  return float_of(static_cast<std::uint32_t>(value.bits) << 16);
}

POPLAR_HOST_DEVICE float widen(Half value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  // Normal numbers: shift exponent and mantissa into place and move the bias from 15 to 127.
  // Infinities and NaNs: all ones in the exponent again.
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);
  const std::uint32_t special = (magnitude << 13) | 0x7f800000u;
  // Subnormals: put the bits below a 0.5 and let the subtraction normalize them, which is exact.
  const std::uint32_t subnormal = bits_of(float_of(magnitude | 0x3f000000u) - 0.5f);
  // 0.5, because its ulp is 2^-24, the subnormal unit of fp16.
  const std::uint32_t small = chosen(magnitude < 0x0400u, subnormal, normal);
  return float_of(sign | chosen(magnitude >= 0x7c00u, special, small));
#endif
}

template <typename To>
POPLAR_HOST_DEVICE To narrow(float value);

template <>
POPLAR_HOST_DEVICE float narrow<float>(float value) {
  return value;
}

template <>
POPLAR_HOST_DEVICE BFloat16 narrow<BFloat16>(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return BFloat16{static_cast<std::uint16_t>(is_nan ? 0x7fc0u : rounded)};
}

template <>
POPLAR_HOST_DEVICE Half narrow<Half>(float value) {
#ifdef __CUDA_ARCH__
  return Half{__half_as_ushort(__float2half_rn(value))};
#else
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: move the bias from 127 to 15, round to nearest even at bit 13. Too large ones
  // (65520 and up) become infinity.
  const std::uint32_t normal =
      (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results (below 2^-14): adding 0.5, whose ulp is their unit, rounds to nearest even.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t finite = chosen(magnitude < 0x38800000u, subnormal, normal);
  const std::uint32_t bounded = chosen(magnitude >= 0x477ff000u, 0x7c00u, finite);
  return Half{static_cast<std::uint16_t>(sign | chosen(magnitude > 0x7f800000u, 0x7e00u, bounded))};
#endif
}

// One element of a packed gradient: the product is rounded to fp32 before it is narrowed or added.
template <typename Bucket, typename Gradient>
POPLAR_HOST_DEVICE Bucket weighted(float weight, Gradient gradient) {
  return narrow<Bucket>(weight * widen(gradient));
}

template <typename Bucket, typename Gradient>
POPLAR_HOST_DEVICE Bucket add_weighted(Bucket bucket, float weight, Gradient gradient) {
  const float product = weight * widen(gradient);
  return narrow<Bucket>(widen(bucket) + product);
}

POPLAR_HOST_DEVICE float square(float value) { return value * value; }

// The value behind `low`, which was rounded from `value`: `low` itself if it was written since.
template <typename Low>
POPLAR_HOST_DEVICE float value_behind(float value, float low) {
  return widen(narrow<Low>(value)) == low ? value : low;
}

}  // namespace poplar

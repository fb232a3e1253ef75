// An exact sum of fp32 values, independent of their order and of how they are divided: a
// fixed-point number wide enough for all fp32 values (Kulisch's accumulator).
//
// Word i counts in units of 2^(28 i - 149). A value adds less than 2^28 to each of two 64-bit
// words, so 2^34 values fit. Carries are not propagated: totals are added word by word, and the
// same values give the same words.
#pragma once

#include "poplar/elementwise.h"

namespace poplar {

constexpr int kExactWords = 16;
constexpr int kExactBits = 28;
constexpr int kExactUsed = 10;       // the largest fp32 ends in word 9
constexpr int kExactNotFinite = 15;  // counts the values that are not finite

// The contribution of one value: `low` to `word`, `high` to the next word.
struct ExactTerm {
  std::int64_t low;
  std::int64_t high;
  std::int32_t word;
  bool is_finite;
};

POPLAR_HOST_DEVICE ExactTerm exact_term(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t exponent = bits >> 23 & 0xffu;
  const std::uint32_t fraction = bits & 0x7fffffu;
  // Subnormals have the exponent of the smallest normal numbers, without their leading bit.
  const std::uint32_t place = exponent == 0 ? 0 : exponent - 1;
  const std::uint64_t mantissa = exponent == 0 ? fraction : fraction | 0x800000u;
  const std::uint64_t shifted = mantissa << place % kExactBits;
  const bool is_finite = exponent != 0xffu;
  const std::int64_t sign = is_finite ? 1 - static_cast<std::int64_t>(bits >> 30 & 2u) : 0;
  const std::uint64_t low = shifted & ((1u << kExactBits) - 1);
  return ExactTerm{sign * static_cast<std::int64_t>(low),
                   sign * static_cast<std::int64_t>(shifted >> kExactBits),
                   static_cast<std::int32_t>(place / kExactBits), is_finite};
}

}  // namespace poplar

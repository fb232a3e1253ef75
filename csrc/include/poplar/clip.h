// The factor that limits a gradient's norm to `max_norm`.
//
// Arithmetic is fp64, every operation is rounded once and their order is fixed, so the same sums
// give the same bits on every device.
#pragma once

#include <cmath>

#include "poplar/exact_sum.h"

namespace poplar {

constexpr double kClipEpsilon = 1e-6;  // torch.nn.utils.clip_grad_norm_'s

// The exact double 2^(28 word - 149).
POPLAR_HOST_DEVICE double exact_unit(int word) {
  const std::uint64_t bits = static_cast<std::uint64_t>(kExactBits * word - 149 + 1023) << 52;
  double unit;
  std::memcpy(&unit, &bits, sizeof unit);
  return unit;
}

// The root of a sum of squares. Carries are propagated first, so that equal sums give equal bits;
// then the words are added, smallest first.
POPLAR_HOST_DEVICE double root_of(const std::int64_t* words) {
  double sum = 0.0;
  std::int64_t carry = 0;
  for (int word = 0; word < kExactNotFinite; ++word) {
    const std::int64_t carried = words[word] + carry;
    const std::int64_t digit = carried & ((std::int64_t{1} << kExactBits) - 1);
    sum += static_cast<double>(digit) * exact_unit(word);  // the product is exact
    carry = carried >> kExactBits;
  }
  return words[kExactNotFinite] == 0 ? std::sqrt(sum) : HUGE_VAL;
}

// NaN stays NaN, as in PyTorch.
POPLAR_HOST_DEVICE double clip_ratio(double norm, double scale, float max_norm) {
  const double ratio = static_cast<double>(max_norm) / (norm * scale + kClipEpsilon);
  return ratio >= 1.0 ? 1.0 : ratio;
}

}  // namespace poplar

// The compressed form of a flat tensor: what ranks send over slow links.
//
// Groups of 64 elements are encoded independently, and encoded groups follow each other. So every
// run of groups is one contiguous message, and owners' slices, which are cut at multiples of 64,
// are too. A group is 64 codes of 8 or 4 bits (the first of two in the lower half of the byte),
// then its scale, the upper half of an fp32. With m the largest magnitude of all 64 coefficients:
//
//   coefficients  x[i], x[i + d] = x[i] + x[i + d], x[i] - x[i + d] for d = 32, 16, 8, 4, 2, 1: the
//                 Hadamard transform, times 8, which spreads outliers over the group
//   scale         m / 127 or m / 7, rounded up, so that no code is clipped; at least 2^-100, which
//                 keeps subnormal numbers out; 0 if m is 0; NaN if m is not finite
//   code          floor(coefficient / scale + u) + 128 or 8, u uniform in [0, 1): unbiased
//
// and decoded elements are the transform, from d = 1 to 32, of (code - 128 or 8) * scale / 64.
// These products are exact, so a fused multiply-add does not change bits. Quotients are fixed-point
// numbers with 15 binary digits, and u has as many. A NaN or an infinity in a group, or a
// coefficient beyond fp32, makes all its decoded elements NaN.
#pragma once

#include "poplar/elementwise.h"

namespace poplar {

constexpr int kGroup = 64;
constexpr std::uint32_t kNotFinite = 0x7fc0;  // the scale of a group that is not finite
constexpr std::size_t kMostRanks = 1024;  // of a sum: their addresses are parameters of a kernel

template <int kBits>
struct Code {
  static_assert(kBits == 8 || kBits == 4);
  static constexpr int kZero = 1 << (kBits - 1);  // the code of 0
  static constexpr std::uint32_t kMask = (1u << kBits) - 1;
  static constexpr int kCodeBytes = kGroup * kBits / 8;
  static constexpr int kGroupBytes = kCodeBytes + 2;
  // Adding 1.5 * 2^23 rounds to an integer, to nearest even: the lower bits of the sum. Of these
  // bits, 15 are behind the point, and those before it are the code of 0, with 2^18 added for 8.
  static constexpr float kInteger = 0x1.8p23f + (kBits == 8 ? 0.0f : 0x1p18f);
};

constexpr std::int64_t group_bytes(std::int64_t bits) { return kGroup * bits / 8 + 2; }

// The random bits of a call: two words from its key, and one word for each two elements.
struct RandomKey {
  std::uint32_t low;
  std::uint32_t high;

  // SplitMix64, so that consecutive keys are unrelated.
  explicit RandomKey(std::int64_t key) {
    std::uint64_t mixed = static_cast<std::uint64_t>(key) + 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    mixed ^= mixed >> 31;
    low = static_cast<std::uint32_t>(mixed);
    high = static_cast<std::uint32_t>(mixed >> 32);
  }
};

// The counter of the first word of a group, for the number of the group in the whole flat tensor.
// The counters of its 32 words are consecutive.
POPLAR_HOST_DEVICE std::uint32_t first_counter(RandomKey key, std::int64_t group) {
  const std::uint64_t word = static_cast<std::uint64_t>(group) * (kGroup / 2);
  return key.low + static_cast<std::uint32_t>(word) +
         static_cast<std::uint32_t>(word >> 32) * 0x9e3779b9u;
}

// A hash with full avalanche (C. Wellons' lowbias32), with half of the key in its middle.
template <typename Word>  // or a vector of words
POPLAR_HOST_DEVICE Word random_word(RandomKey key, Word counter) {
  Word word = counter;
  word = (word ^ word >> 16) * 0x21f0aaadu;
  word = (word ^ word >> 15 ^ key.high) * 0x735a2d97u;
  return word ^ word >> 15;
}

// 15 random bits for the first and for the second of two elements.
template <typename Word>
POPLAR_HOST_DEVICE Word first_random(Word word) {
  return word & 0x7fffu;
}
template <typename Word>
POPLAR_HOST_DEVICE Word second_random(Word word) {
  return word >> 17;
}

// The scale for the bits of the largest magnitude. Magnitudes compare as their bits do, NaN last.
template <int kBits>
POPLAR_HOST_DEVICE std::uint32_t scale_bits(std::uint32_t largest) {
  // A little above 1 / 127 and 1 / 7: covers the rounding of all products.
  constexpr float kStep = (1.0f + 0x1p-20f) / static_cast<float>(Code<kBits>::kZero - 1);
  constexpr std::uint32_t kSmallest = (127 - 100) << 7;
  const std::uint32_t rounded = (bits_of(float_of(largest) * kStep) + 0xffffu) >> 16;
  const std::uint32_t bounded = rounded < kSmallest ? kSmallest : rounded;
  return largest == 0 ? 0 : largest >= 0x7f800000u ? kNotFinite : bounded;
}

POPLAR_HOST_DEVICE float scale_of(std::uint32_t bits) { return float_of(bits << 16); }

// Fixed-point units per coefficient; 0 if all coefficients are. With the scale kNotFinite, they
// must be replaced by 0.
POPLAR_HOST_DEVICE float units_of(std::uint32_t scale_bits) {
  return scale_bits != 0 && scale_bits != kNotFinite ? 32768.0f / scale_of(scale_bits) : 0.0f;
}

template <int kBits>
POPLAR_HOST_DEVICE std::uint32_t code_of(float coefficient, float units, std::uint32_t random) {
  const float sum = coefficient * units + Code<kBits>::kInteger;
  return (bits_of(sum) + random) >> 15 & Code<kBits>::kMask;
}

// One element's coefficient from its code; `share` is scale / 64.
template <int kBits>
POPLAR_HOST_DEVICE float coefficient_of(std::uint32_t code, float share) {
  return static_cast<float>(static_cast<std::int32_t>(code) - Code<kBits>::kZero) * share;
}

}  // namespace poplar

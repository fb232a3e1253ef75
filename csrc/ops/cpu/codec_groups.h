// One group of poplar/codec.h, in eight registers of eight elements.
//
// Uses the compiler's vector types, which work with every instruction set. GCC 12 vectorizes loops
// to code that takes 1.3 times as long with AVX-512 and 1.9 times with AVX2 (Zen 4, data in the
// cache). Without AVX2 it exchanges elements one by one, which takes ten times as long.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "poplar/codec.h"

namespace poplar {

constexpr int kLanes = 8;
constexpr int kRegisters = kGroup / kLanes;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));

#if __has_builtin(__builtin_shufflevector)
#define POPLAR_SHUFFLE(low, high, ...) __builtin_shufflevector(low, high, __VA_ARGS__)
#else  // GCC before 12
#define POPLAR_SHUFFLE(low, high, ...) __builtin_shuffle(low, high, Integers{__VA_ARGS__})
#endif

// Two elements of a level are at the same lane of two registers. Between levels, pairs of registers
// exchange elements: the bit of the elements' numbers that tells the registers apart becomes one of
// the lane, and another bit of the lane takes its place.
inline __attribute__((always_inline)) void exchange_halves(Floats& low, Floats& high) {
  const Floats first = POPLAR_SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11);
  high = POPLAR_SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
  low = first;
}

inline __attribute__((always_inline)) void interleave(Floats& low, Floats& high) {
  const Floats first = POPLAR_SHUFFLE(low, high, 0, 8, 1, 9, 4, 12, 5, 13);
  high = POPLAR_SHUFFLE(low, high, 2, 10, 3, 11, 6, 14, 7, 15);
  low = first;
}

inline __attribute__((always_inline)) void separate(Floats& low, Floats& high) {
  const Floats first = POPLAR_SHUFFLE(low, high, 0, 2, 8, 10, 4, 6, 12, 14);
  high = POPLAR_SHUFFLE(low, high, 1, 3, 9, 11, 5, 7, 13, 15);
  low = first;
}

// A level of the transform, between registers at a distance.
template <int kDistance>
inline __attribute__((always_inline)) void transform_level(Floats* x) {
  for (int i = 0; i < kRegisters; ++i) {
    if ((i & kDistance) == 0) {
      const Floats low = x[i];
      const Floats high = x[i + kDistance];
      x[i] = low + high;
      x[i + kDistance] = low - high;
    }
  }
}

template <void (*kExchange)(Floats&, Floats&)>
inline __attribute__((always_inline)) void exchange(Floats* x) {
  for (int i = 0; i < kRegisters; i += 2) {
    kExchange(x[i], x[i + 1]);
  }
}

// Then each pair of registers has the even and the odd ones of 16 elements.
inline __attribute__((always_inline)) void transform(Floats* x) {
  transform_level<4>(x);
  transform_level<2>(x);
  transform_level<1>(x);
  exchange<exchange_halves>(x);
  transform_level<1>(x);
  exchange<interleave>(x);
  transform_level<1>(x);
  exchange<interleave>(x);
  transform_level<1>(x);
}

inline __attribute__((always_inline)) void transform_back(Floats* x) {
  transform_level<1>(x);
  exchange<separate>(x);
  transform_level<1>(x);
  exchange<separate>(x);
  transform_level<1>(x);
  exchange<exchange_halves>(x);
  transform_level<1>(x);
  transform_level<2>(x);
  transform_level<4>(x);
}

inline __attribute__((always_inline)) Floats load(const float* values) {
  Floats x;
  std::memcpy(&x, values, sizeof x);
  return x;
}

inline __attribute__((always_inline)) Floats load(const BFloat16* values) {
  Halves narrow;
  std::memcpy(&narrow, values, sizeof narrow);
  return reinterpret_cast<Floats>(__builtin_convertvector(narrow, Words) << 16);
}

inline __attribute__((always_inline)) Floats load(const Half* values) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    wide[i] = widen(values[i]);
  }
  return load(wide);
}

// The bits of the largest magnitude.
inline __attribute__((always_inline)) std::uint32_t largest_of(const Floats* x) {
  Integers largest[kRegisters];
  for (int i = 0; i < kRegisters; ++i) {
    largest[i] = reinterpret_cast<Integers>(x[i]) & 0x7fffffff;
  }
  for (int count = kRegisters / 2; count > 0; count /= 2) {
    for (int i = 0; i < count; ++i) {
      const Integers other = largest[i + count];
      largest[i] = other > largest[i] ? other : largest[i];
    }
  }
  std::int32_t lanes[kLanes];
  std::memcpy(lanes, largest, sizeof lanes);
  return static_cast<std::uint32_t>(*std::max_element(lanes, lanes + kLanes));
}

// Two codes for each lane, of the registers with the even and the odd ones of 16 elements.
template <int kBits>
inline __attribute__((always_inline)) Words pairs_of(const Floats* x, float units, RandomKey key,
                                                     std::uint32_t counter) {
  const Words lane = {0, 1, 2, 3, 4, 5, 6, 7};
  const Words word = random_word(key, lane + counter);
  const Floats even = x[0] * units + Code<kBits>::kInteger;
  const Floats odd = x[1] * units + Code<kBits>::kInteger;
  const Words first = (reinterpret_cast<Words>(even) + first_random(word)) >> 15;
  const Words second = (reinterpret_cast<Words>(odd) + second_random(word)) >> 15;
  return (first & Code<kBits>::kMask) | (second & Code<kBits>::kMask) << kBits;
}

template <int kBits>
using Pairs = std::conditional_t<kBits == 8, Halves, Bytes>;

template <int kBits>
inline __attribute__((always_inline)) void put_codes(std::uint8_t* group, const Floats* x,
                                                     std::uint32_t scale, float units,
                                                     RandomKey key, std::uint32_t counter) {
  for (int i = 0; i < kRegisters / 2; ++i) {
    const auto first = counter + static_cast<std::uint32_t>(i * kLanes);
    const auto pairs =
        __builtin_convertvector(pairs_of<kBits>(x + 2 * i, units, key, first), Pairs<kBits>);
    std::memcpy(group + i * sizeof pairs, &pairs, sizeof pairs);
  }
  const auto half = static_cast<std::uint16_t>(scale);
  std::memcpy(group + Code<kBits>::kCodeBytes, &half, sizeof half);
}

// Groups that are encoded together, in a loop over the groups for each step, so that a step seldom
// waits for the one before. One group after the other took 1.2 (AVX-512) to 1.7 times (AVX2) as
// long.
constexpr int kBatch = 8;

// Encodes up to kBatch groups; `number` is that of the first one in the whole flat tensor.
template <int kBits, typename Value>
inline __attribute__((always_inline)) void encode_batch(std::uint8_t* codes, const Value* values,
                                                        int groups, float weight, RandomKey key,
                                                        std::int64_t number) {
  Floats x[kBatch][kRegisters];
  std::uint32_t scales[kBatch];
  float units[kBatch];
  for (int group = 0; group < groups; ++group) {
    Floats own[kRegisters];
    for (int i = 0; i < kRegisters; ++i) {
      own[i] = load(values + group * kGroup + i * kLanes) * weight;
    }
    transform(own);
    scales[group] = largest_of(own);
    std::copy_n(own, kRegisters, x[group]);
  }
  for (int group = 0; group < groups; ++group) {
    scales[group] = scale_bits<kBits>(scales[group]);
    units[group] = units_of(scales[group]);
    if (scales[group] == kNotFinite) {
      std::fill_n(x[group], kRegisters, Floats{});
    }
  }
  for (int group = 0; group < groups; ++group) {
    put_codes<kBits>(codes + group * Code<kBits>::kGroupBytes, x[group], scales[group],
                     units[group], key, first_counter(key, number + group));
  }
}

// The sum over ranks of the group at an offset, in rank order.
template <int kBits>
inline __attribute__((always_inline)) void decode_group(float* values,
                                                        const std::uint8_t* const* ranks, int size,
                                                        std::int64_t offset) {
  Floats total[kRegisters] = {};
  for (int rank = 0; rank < size; ++rank) {
    const std::uint8_t* group = ranks[rank] + offset;
    std::uint16_t half;
    std::memcpy(&half, group + Code<kBits>::kCodeBytes, sizeof half);
    const float share = scale_of(half) * 0x1p-6f;
    for (int i = 0; i < kRegisters; i += 2) {
      Pairs<kBits> pairs;
      std::memcpy(&pairs, group + i / 2 * sizeof pairs, sizeof pairs);
      // In two steps, because GCC 12 converts bytes to words one by one.
      const auto wide = __builtin_convertvector(__builtin_convertvector(pairs, Halves), Integers);
      const Integers first = (wide & Code<kBits>::kMask) - Code<kBits>::kZero;
      const Integers second = (wide >> kBits) - Code<kBits>::kZero;
      total[i] += __builtin_convertvector(first, Floats) * share;
      total[i + 1] += __builtin_convertvector(second, Floats) * share;
    }
  }
  transform_back(total);
  for (int i = 0; i < kRegisters; ++i) {
    std::memcpy(values + i * kLanes, &total[i], sizeof total[i]);
  }
}

}  // namespace poplar

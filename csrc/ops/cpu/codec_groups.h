// One group of poplar/codec.h: portable, and with AVX-512.
#pragma once

#include <algorithm>
#include <cstring>

#include "block_sums.h"
#include "parallel.h"
#include "poplar/codec.h"
#include "widen.h"

namespace poplar {

constexpr int kHalf = kGroup / 2;
constexpr int kLanes = 16;

template <int kDistance>
inline __attribute__((always_inline)) void transform_level(float* values) {
  for (int begin = 0; begin < kGroup; begin += 2 * kDistance) {
    for (int i = begin; i < begin + kDistance; ++i) {
      const float low = values[i];
      const float high = values[i + kDistance];
      values[i] = low + high;
      values[i + kDistance] = low - high;
    }
  }
}

inline __attribute__((always_inline)) void transform(float* values) {
  transform_level<32>(values);
  transform_level<16>(values);
  transform_level<4>(values);
  transform_level<2>(values);
  transform_level<1>(values);
}

inline __attribute__((always_inline)) void transform_back(float* values) {
  transform_level<1>(values);
  transform_level<2>(values);
  transform_level<4>(values);
  transform_level<16>(values);
  transform_level<32>(values);
}

template <int kBits>
inline __attribute__((always_inline)) void put_scale(std::uint8_t* group, std::uint32_t bits) {
  const auto half = static_cast<std::uint16_t>(bits);
  std::memcpy(group + Code<kBits>::kCodeBytes, &half, sizeof half);
}

// Scale / 32 of an encoded group.
template <int kBits>
inline __attribute__((always_inline)) float share_of(const std::uint8_t* group) {
  std::uint16_t half;
  std::memcpy(&half, group + Code<kBits>::kCodeBytes, sizeof half);
  return scale_of(half) * 0x1p-5f;
}

// `values` are overwritten.
template <int kBits>
inline __attribute__((always_inline)) void encode_group(std::uint8_t* group, float* values,
                                                        RandomKey key, std::uint32_t counter) {
  transform(values);
  std::uint32_t largest = 0;
  for (int i = 0; i < kGroup; ++i) {
    largest = std::max(largest, bits_of(values[i]) & 0x7fffffffu);
  }
  const std::uint32_t scale = scale_bits<kBits>(largest);
  put_scale<kBits>(group, scale);
  if (scale == kNotFinite) {
    std::fill_n(values, kGroup, 0.0f);
  }
  const float units = units_of(scale);
  std::uint8_t codes[kGroup];
  for (int i = 0; i < kHalf; ++i) {
    const std::uint32_t word = random_word(key, counter + static_cast<std::uint32_t>(i));
    codes[2 * i] = code_of<kBits>(values[2 * i], units, first_random(word));
    codes[2 * i + 1] = code_of<kBits>(values[2 * i + 1], units, second_random(word));
  }
  if constexpr (kBits == 8) {
    std::memcpy(group, codes, kGroup);
  } else {
    for (int i = 0; i < kHalf; ++i) {
      group[i] = static_cast<std::uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    }
  }
}

// The sum over ranks of the same group, in rank order.
template <int kBits>
inline __attribute__((always_inline)) void decode_group(float* values,
                                                        const std::uint8_t* const* ranks, int size,
                                                        std::int64_t offset) {
  std::fill_n(values, kGroup, 0.0f);
  for (int rank = 0; rank < size; ++rank) {
    const std::uint8_t* group = ranks[rank] + offset;
    const float share = share_of<kBits>(group);
    std::uint8_t codes[kGroup];
    if constexpr (kBits == 8) {
      std::memcpy(codes, group, kGroup);
    } else {
      for (int i = 0; i < kHalf; ++i) {
        codes[2 * i] = group[i] & Code<4>::kMask;
        codes[2 * i + 1] = group[i] >> 4;
      }
    }
    for (int i = 0; i < kGroup; ++i) {
      values[i] += coefficient_of<kBits>(codes[i], share);
    }
  }
  transform_back(values);
}

#ifdef POPLAR_WIDE

// GCC 12 takes the undefined registers of its own header for variables of this code.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

POPLAR_WIDE inline __attribute__((always_inline)) __m512 load_sixteen(const float* values) {
  return _mm512_loadu_ps(values);
}

POPLAR_WIDE inline __attribute__((always_inline)) __m512 load_sixteen(const BFloat16* values) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

POPLAR_WIDE inline __attribute__((always_inline)) __m512 load_sixteen(const Half* values) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
}

// Which lanes of two registers a permutation takes, for each of its two results. The bits of a
// lane's number in the result become these bits of its source; `register_bit` is 0 or 1.
struct Lanes {
  alignas(64) std::int32_t of[2][kLanes];

  constexpr Lanes(int bit_3, int bit_2, int bit_1, int bit_0, int register_bit) : of{} {
    for (int result = 0; result < 2; ++result) {
      for (int lane = 0; lane < kLanes; ++lane) {
        of[result][lane] = (lane >> 3 & 1) * bit_3 | (lane >> 2 & 1) * bit_2 |
                           (lane >> 1 & 1) * bit_1 | (lane & 1) * bit_0 | result * register_bit;
      }
    }
  }
};

// Two elements of a level are at the same lane of two registers. So between levels, one bit of the
// elements' numbers moves from the lanes to the registers. First the registers have bit 4 and the
// lanes bits 3 to 0; after the last level the registers have bit 0, and pairs of codes are at the
// same lane.
constexpr Lanes kNextLevel(8, 2, 1, 16, 4);
constexpr Lanes kLastLevel(2, 8, 1, 16, 4);
constexpr Lanes kSecondLevelBack(4, 16, 8, 2, 1);
constexpr Lanes kNextLevelBack(8, 16, 4, 2, 1);

POPLAR_WIDE inline __attribute__((always_inline)) void add_and_subtract(__m512& low, __m512& high) {
  const __m512 sum = _mm512_add_ps(low, high);
  high = _mm512_sub_ps(low, high);
  low = sum;
}

POPLAR_WIDE inline __attribute__((always_inline)) void permute(__m512& low, __m512& high,
                                                               const Lanes& lanes) {
  const __m512 first = _mm512_permutex2var_ps(low, _mm512_load_si512(lanes.of[0]), high);
  high = _mm512_permutex2var_ps(low, _mm512_load_si512(lanes.of[1]), high);
  low = first;
}

// As `transform`, but each half then has its even elements in one register and its odd ones in the
// next.
POPLAR_WIDE inline __attribute__((always_inline)) void transform(__m512 (&values)[4]) {
  add_and_subtract(values[0], values[2]);
  add_and_subtract(values[1], values[3]);
  for (int half = 0; half < 4; half += 2) {
    __m512& low = values[half];
    __m512& high = values[half + 1];
    add_and_subtract(low, high);
    permute(low, high, kNextLevel);
    add_and_subtract(low, high);
    permute(low, high, kNextLevel);
    add_and_subtract(low, high);
    permute(low, high, kLastLevel);
    add_and_subtract(low, high);
  }
}

POPLAR_WIDE inline __attribute__((always_inline)) void transform_back(__m512 (&values)[4]) {
  for (int half = 0; half < 4; half += 2) {
    __m512& low = values[half];
    __m512& high = values[half + 1];
    add_and_subtract(low, high);
    permute(low, high, kSecondLevelBack);
    add_and_subtract(low, high);
    permute(low, high, kNextLevelBack);
    add_and_subtract(low, high);
    permute(low, high, kNextLevelBack);
    add_and_subtract(low, high);
  }
  add_and_subtract(values[0], values[2]);
  add_and_subtract(values[1], values[3]);
}

// `random_word` of 16 consecutive counters.
POPLAR_WIDE inline __attribute__((always_inline)) __m512i random_words(RandomKey key,
                                                                       std::uint32_t counter) {
  __m512i word = _mm512_add_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
      _mm512_set1_epi32(static_cast<int>(counter)));
  word = _mm512_xor_si512(word, _mm512_srli_epi32(word, 16));
  word = _mm512_mullo_epi32(word, _mm512_set1_epi32(0x21f0aaad));
  word = _mm512_xor_si512(_mm512_xor_si512(word, _mm512_srli_epi32(word, 15)),
                          _mm512_set1_epi32(static_cast<int>(key.high)));
  word = _mm512_mullo_epi32(word, _mm512_set1_epi32(0x735a2d97));
  return _mm512_xor_si512(word, _mm512_srli_epi32(word, 15));
}

// As `code_of`, with other bits above those of the code.
template <int kBits>
POPLAR_WIDE inline __attribute__((always_inline)) __m512i unmasked_codes(__m512 coefficients,
                                                                         __m512 units,
                                                                         __m512i random) {
  const __m512 integer = _mm512_set1_ps(Code<kBits>::kInteger);
  const __m512 sum = _mm512_add_ps(_mm512_mul_ps(coefficients, units), integer);
  return _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(sum), random), 15);
}

// As `encode_group`, of values in registers.
template <int kBits>
POPLAR_WIDE inline __attribute__((always_inline)) void encode_registers(std::uint8_t* group,
                                                                        __m512 (&values)[4],
                                                                        RandomKey key,
                                                                        std::uint32_t counter) {
  transform(values);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  for (const __m512& sixteen : values) {
    largest = _mm512_max_epu32(largest,
                               _mm512_and_si512(_mm512_castps_si512(sixteen), magnitude));
  }
  const std::uint32_t scale = scale_bits<kBits>(_mm512_reduce_max_epu32(largest));
  put_scale<kBits>(group, scale);
  if (__builtin_expect(scale == kNotFinite, 0)) {
    std::fill_n(values, 4, _mm512_setzero_ps());
  }
  const __m512 units = _mm512_set1_ps(units_of(scale));
  const __m512i mask = _mm512_set1_epi32(Code<kBits>::kMask);
  for (int half = 0; half < 2; ++half) {
    const __m512i words = random_words(key, counter + static_cast<std::uint32_t>(half * kLanes));
    const __m512i first_bits = _mm512_and_si512(words, _mm512_set1_epi32(0x7fff));
    const __m512i second_bits = _mm512_srli_epi32(words, 17);
    const __m512i first =
        _mm512_and_si512(unmasked_codes<kBits>(values[2 * half], units, first_bits), mask);
    const __m512i second = unmasked_codes<kBits>(values[2 * half + 1], units, second_bits);
    const __m512i pairs = _mm512_or_si512(first, _mm512_slli_epi32(second, kBits));
    if constexpr (kBits == 8) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(group) + half, _mm512_cvtepi32_epi16(pairs));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(group) + half, _mm512_cvtepi32_epi8(pairs));
    }
  }
}

// Pairs of codes of half a group, each in the lower bits of its word.
template <int kBits>
POPLAR_WIDE inline __attribute__((always_inline)) __m512i load_pairs(const std::uint8_t* group,
                                                                     int half) {
  if constexpr (kBits == 8) {
    return _mm512_cvtepu16_epi32(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group) + half));
  } else {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group) + half));
  }
}

// As `coefficient_of`, added to `total`.
template <int kBits>
POPLAR_WIDE inline __attribute__((always_inline)) __m512 add_coefficients(__m512 total,
                                                                          __m512i codes,
                                                                          __m512 share) {
  const __m512i number = _mm512_sub_epi32(codes, _mm512_set1_epi32(Code<kBits>::kZero));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(number), share, total);  // the product is exact
}

// As `decode_group`, to memory aligned to 64 bytes.
template <int kBits>
POPLAR_WIDE inline __attribute__((always_inline)) void decode_wide(
    float* values, const std::uint8_t* const* ranks, int size, std::int64_t offset) {
  __m512 total[4];
  const __m512i mask = _mm512_set1_epi32(Code<kBits>::kMask);
  for (__m512& sixteen : total) {
    sixteen = _mm512_setzero_ps();
  }
  for (int rank = 0; rank < size; ++rank) {
    const std::uint8_t* group = ranks[rank] + offset;
    const __m512 share = _mm512_set1_ps(share_of<kBits>(group));
    for (int half = 0; half < 2; ++half) {
      const __m512i pairs = load_pairs<kBits>(group, half);
      const __m512i first = _mm512_and_si512(pairs, mask);
      const __m512i second = _mm512_srli_epi32(pairs, kBits);
      total[2 * half] = add_coefficients<kBits>(total[2 * half], first, share);
      total[2 * half + 1] = add_coefficients<kBits>(total[2 * half + 1], second, share);
    }
  }
  transform_back(total);
  for (int i = 0; i < 4; ++i) {
    _mm512_store_ps(values + i * kLanes, total[i]);
  }
}

#pragma GCC diagnostic pop
#endif

}  // namespace poplar

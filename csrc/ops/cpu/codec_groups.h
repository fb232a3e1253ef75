// One group of poplar/codec.h: portable, and with AVX-512.
#pragma once

#include <algorithm>
#include <cstring>

#include "block_sums.h"
#include "parallel.h"
#include "poplar/codec.h"
#include "widen.h"

namespace poplar {

constexpr int kHalf = kTransform / 2;

// The transform with its levels as loops that compilers vectorize: the halves' sums and differences
// take turns, so after five levels every element is back at its place. The last level leaves even
// and odd elements apart, as pairs of codes need them.
inline __attribute__((always_inline)) void transform(float* even, float* odd, const float* values) {
  float x[kTransform];
  std::copy_n(values, kTransform, x);
  for (int level = 0; level < 4; ++level) {
    float y[kTransform];
    for (int i = 0; i < kHalf; ++i) {
      y[2 * i] = x[i] + x[i + kHalf];
      y[2 * i + 1] = x[i] - x[i + kHalf];
    }
    std::copy_n(y, kTransform, x);
  }
  for (int i = 0; i < kHalf; ++i) {
    even[i] = x[i] + x[i + kHalf];
    odd[i] = x[i] - x[i + kHalf];
  }
}

inline __attribute__((always_inline)) void transform_back(float* values, const float* even,
                                                          const float* odd) {
  float x[kTransform];
  for (int i = 0; i < kHalf; ++i) {
    x[i] = even[i] + odd[i];
    x[i + kHalf] = even[i] - odd[i];
  }
  for (int level = 0; level < 4; ++level) {
    float y[kTransform];
    for (int i = 0; i < kHalf; ++i) {
      y[i] = x[2 * i] + x[2 * i + 1];
      y[i + kHalf] = x[2 * i] - x[2 * i + 1];
    }
    std::copy_n(y, kTransform, x);
  }
  std::copy_n(x, kTransform, values);
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

template <int kBits>
inline __attribute__((always_inline)) void encode_group(std::uint8_t* group, const float* values,
                                                        RandomKey key, std::uint32_t counter) {
  float even[kTransform], odd[kTransform];
  transform(even, odd, values);
  transform(even + kHalf, odd + kHalf, values + kTransform);
  std::uint32_t largest = 0;
  for (int i = 0; i < kTransform; ++i) {
    largest = std::max(largest, bits_of(even[i]) & 0x7fffffffu);
    largest = std::max(largest, bits_of(odd[i]) & 0x7fffffffu);
  }
  const std::uint32_t scale = scale_bits<kBits>(largest);
  const float units = units_of(scale);
  if (units == 0) {
    std::fill_n(even, kTransform, 0.0f);
    std::fill_n(odd, kTransform, 0.0f);
  }
  std::uint32_t pairs[kTransform];
  for (int i = 0; i < kTransform; ++i) {
    const std::uint32_t word = random_word(key, counter + static_cast<std::uint32_t>(i));
    const std::uint32_t first = code_of<kBits>(even[i], units, first_random(word));
    pairs[i] = first | code_of<kBits>(odd[i], units, second_random(word)) << kBits;
  }
  for (int i = 0; i < kTransform; ++i) {
    if constexpr (kBits == 8) {
      const auto pair = static_cast<std::uint16_t>(pairs[i]);
      std::memcpy(group + 2 * i, &pair, sizeof pair);
    } else {
      group[i] = static_cast<std::uint8_t>(pairs[i]);
    }
  }
  put_scale<kBits>(group, scale);
}

// The sum over ranks of the same group, in rank order.
template <int kBits>
inline __attribute__((always_inline)) void decode_group(float* values,
                                                        const std::uint8_t* const* ranks, int size,
                                                        std::int64_t offset) {
  float even[kTransform] = {}, odd[kTransform] = {};
  for (int rank = 0; rank < size; ++rank) {
    const std::uint8_t* group = ranks[rank] + offset;
    const float share = share_of<kBits>(group);
    for (int i = 0; i < kTransform; ++i) {
      const std::uint32_t first = kBits == 8 ? group[2 * i] : group[i] & Code<4>::kMask;
      const std::uint32_t second = kBits == 8 ? group[2 * i + 1] : group[i] >> 4;
      even[i] += coefficient_of<kBits>(first, share);
      odd[i] += coefficient_of<kBits>(second, share);
    }
  }
  transform_back(values, even, odd);
  transform_back(values + kTransform, even + kHalf, odd + kHalf);
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

// Elements 0, 16, 1, 17, ... (and, `from` 8: 8, 24, 9, 25, ...) of two registers.
POPLAR_WIDE inline __attribute__((always_inline)) __m512i interleaving(int from) {
  const __m512i first =
      _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return _mm512_add_epi32(first, _mm512_set1_epi32(from));
}

// Elements 0, 2, 4, ... (`from` 1: 1, 3, 5, ...) of two registers.
POPLAR_WIDE inline __attribute__((always_inline)) __m512i every_second(int from) {
  const __m512i first =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return _mm512_add_epi32(first, _mm512_set1_epi32(from));
}

// As `transform`, of two registers in place: the even elements, then the odd ones.
POPLAR_WIDE inline __attribute__((always_inline)) void transform(__m512& low, __m512& high) {
  for (int level = 0; level < 4; ++level) {
    const __m512 sum = _mm512_add_ps(low, high);
    const __m512 difference = _mm512_sub_ps(low, high);
    low = _mm512_permutex2var_ps(sum, interleaving(0), difference);
    high = _mm512_permutex2var_ps(sum, interleaving(8), difference);
  }
  const __m512 sum = _mm512_add_ps(low, high);
  high = _mm512_sub_ps(low, high);
  low = sum;
}

POPLAR_WIDE inline __attribute__((always_inline)) void transform_back(__m512& even, __m512& odd) {
  for (int level = 0; level < 4; ++level) {
    const __m512 sum = _mm512_add_ps(even, odd);
    const __m512 difference = _mm512_sub_ps(even, odd);
    even = _mm512_permutex2var_ps(sum, every_second(0), difference);
    odd = _mm512_permutex2var_ps(sum, every_second(1), difference);
  }
  const __m512 sum = _mm512_add_ps(even, odd);
  odd = _mm512_sub_ps(even, odd);
  even = sum;
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
  const __m512 integer = _mm512_set1_ps(integer_offset<kBits>());
  const __m512 sum = _mm512_add_ps(_mm512_mul_ps(coefficients, units), integer);
  return _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(sum), random), 15);
}

// As `encode_group`, of values in registers.
template <int kBits>
POPLAR_WIDE inline __attribute__((always_inline)) void encode_registers(std::uint8_t* group,
                                                                        __m512 (&values)[4],
                                                                        RandomKey key,
                                                                        std::uint32_t counter) {
  transform(values[0], values[1]);
  transform(values[2], values[3]);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  for (const __m512& sixteen : values) {
    largest = _mm512_max_epu32(largest,
                               _mm512_and_si512(_mm512_castps_si512(sixteen), magnitude));
  }
  const std::uint32_t scale = scale_bits<kBits>(_mm512_reduce_max_epu32(largest));
  const float unit = units_of(scale);
  const __mmask16 is_number = unit == 0 ? 0 : 0xffff;
  const __m512 units = _mm512_set1_ps(unit);
  const __m512i mask = _mm512_set1_epi32(Code<kBits>::kMask);
  for (int half = 0; half < 2; ++half) {
    const __m512i words = random_words(key, counter + static_cast<std::uint32_t>(half * kHalf));
    const __m512i first_bits = _mm512_and_si512(words, _mm512_set1_epi32(0x7fff));
    const __m512i second_bits = _mm512_srli_epi32(words, 17);
    const __m512 even = _mm512_maskz_mov_ps(is_number, values[2 * half]);
    const __m512 odd = _mm512_maskz_mov_ps(is_number, values[2 * half + 1]);
    const __m512i first = _mm512_and_si512(unmasked_codes<kBits>(even, units, first_bits), mask);
    const __m512i second = unmasked_codes<kBits>(odd, units, second_bits);
    const __m512i pairs = _mm512_or_si512(first, _mm512_slli_epi32(second, kBits));
    if constexpr (kBits == 8) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(group) + half, _mm512_cvtepi32_epi16(pairs));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(group) + half, _mm512_cvtepi32_epi8(pairs));
    }
  }
  put_scale<kBits>(group, scale);
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
  for (int half = 0; half < 2; ++half) {
    transform_back(total[2 * half], total[2 * half + 1]);
    _mm512_store_ps(values + half * kTransform, total[2 * half]);
    _mm512_store_ps(values + half * kTransform + kHalf, total[2 * half + 1]);
  }
}

#endif

}  // namespace poplar

// Access to several consecutive elements at once, up to 16 bytes, if addresses are aligned.
#pragma once

#include <cstdint>
#include <type_traits>

#include "poplar/elementwise.h"
#include "poplar/segments.h"

namespace poplar::cuda {

// Elements that a thread processes at once: 16 bytes.
template <typename Element>
constexpr int kVector = 16 / sizeof(Element);

// As words, because a struct of 16-bit elements would be moved element by element.
template <typename Element, int kCount>
struct alignas(kCount * sizeof(Element) < 16 ? kCount * sizeof(Element) : 16) Vector {
  std::uint32_t words[kCount * sizeof(Element) / 4];
};

POPLAR_HOST_DEVICE float element_of(const std::uint32_t* words, int i, float) {
  return float_of(words[i]);
}

template <typename Narrow>
POPLAR_HOST_DEVICE float element_of(const std::uint32_t* words, int i, Narrow) {
  return widen(Narrow{static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16))});
}

POPLAR_HOST_DEVICE std::uint32_t word_of(const float* values, int word, float) {
  return bits_of(values[word]);
}

template <typename Narrow>
POPLAR_HOST_DEVICE std::uint32_t word_of(const float* values, int word, Narrow) {
  const std::uint32_t low = narrow<Narrow>(values[2 * word]).bits;
  const std::uint32_t high = narrow<Narrow>(values[2 * word + 1]).bits;
  return low | high << 16;
}

// Whether `kCount` elements can be accessed at once at this address and at multiples of `kCount`
// from it.
template <int kCount, typename Element>
POPLAR_HOST_DEVICE bool is_aligned(const Element* address) {
  return reinterpret_cast<std::uintptr_t>(address) % alignof(Vector<Element, kCount>) == 0;
}

// Loads `count` of `kCount` elements as fp32, followed by zeros; in one access if all are there and
// the address is aligned.
template <int kCount, typename Element>
POPLAR_HOST_DEVICE void load(float (&values)[kCount], const Element* address, std::int64_t count,
                             bool aligned) {
  if (aligned && count >= kCount) {
    const auto vector = *reinterpret_cast<const Vector<Element, kCount>*>(address);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = element_of(vector.words, i, Element{});
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = i < count ? widen(address[i]) : 0.0f;
    }
  }
}

// Stores the first `count` of `kCount` values, rounded to the element type.
template <int kCount, typename Element>
POPLAR_HOST_DEVICE void store(Element* address, const float (&values)[kCount], std::int64_t count,
                              bool aligned) {
  if (aligned && count >= kCount) {
    Vector<Element, kCount> vector;
#pragma unroll
    for (int word = 0; word < static_cast<int>(kCount * sizeof(Element) / 4); ++word) {
      vector.words[word] = word_of(values, word, Element{});
    }
    *reinterpret_cast<Vector<Element, kCount>*>(address) = vector;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) {
        address[i] = narrow<Element>(values[i]);
      }
    }
  }
}

}  // namespace poplar::cuda

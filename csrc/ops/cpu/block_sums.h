// Sums of squares of aligned 64-element blocks, the leaves of the gradient norm's fixed tree.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "poplar/elementwise.h"

namespace poplar {

constexpr std::int64_t kBlock = 64;

// The tree halves the block: x[:32] + x[32:], then 16 and 16, down to 1. Uses the compiler's vector
// types, which work with every instruction set: GCC 12 compiles the plain loops to code that takes
// twice as long.
inline __attribute__((always_inline)) float block_sum(const float* block) {
  typedef float Sixteen __attribute__((vector_size(64)));
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Sixteen x[4];
  std::memcpy(x, block, sizeof x);
  const Sixteen first = x[0] * x[0] + x[2] * x[2];
  const Sixteen second = x[1] * x[1] + x[3] * x[3];
  const Sixteen sum = first + second;
  Eight halves[2];
  std::memcpy(halves, &sum, sizeof halves);
  const Eight eight = halves[0] + halves[1];
  Four quarters[2];
  std::memcpy(quarters, &eight, sizeof quarters);
  const Four four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

template <typename Value>
inline __attribute__((always_inline)) float block_sum(const Value* block) {
  float wide[kBlock];
  for (std::int64_t i = 0; i < kBlock; ++i) {
    wide[i] = widen(block[i]);
  }
  return block_sum(static_cast<const float*>(wide));
}

// Block sums of `count` elements from the start of a block; the last block is padded with zeros.
template <typename Value>
inline __attribute__((always_inline)) void block_sums(float* sums, const Value* values,
                                                      std::int64_t count) {
  const std::int64_t whole = count / kBlock;
  for (std::int64_t block = 0; block < whole; ++block) {
    sums[block] = block_sum(values + block * kBlock);
  }
  if (const std::int64_t tail = count % kBlock; tail != 0) {
    Value padded[kBlock] = {};
    std::copy_n(values + whole * kBlock, tail, padded);
    sums[whole] = block_sum(padded);
  }
}

}  // namespace poplar

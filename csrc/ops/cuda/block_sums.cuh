// Sums of squares of 64-element blocks, in the halving tree of block_sums_of_squares in poplar/ops.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "poplar/elementwise.h"

namespace poplar::cuda {

constexpr std::int64_t kBlock = 64;

// Called by whole warps, whose threads hold `kCount` neighbouring values each, thread after thread;
// this one's begin at `first`, which is a multiple of `kCount` and for the warp's first thread of
// 64. Values past `numel` are zeros. Distances of 32 to `kCount` elements lie between threads, the
// smaller ones within.
template <int kCount>
__device__ void store_block_sums(float* sums, const float (&values)[kCount], std::int64_t first,
                                 std::int64_t numel) {
  float squares[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    squares[i] = square(values[i]);
  }
#pragma unroll
  for (int distance = 32 / kCount; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], distance);
    }
  }
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
      squares[i] += squares[i + half];
    }
  }
  if (first % kBlock == 0 && first < numel) {
    sums[first / kBlock] = squares[0];
  }
}

}  // namespace poplar::cuda

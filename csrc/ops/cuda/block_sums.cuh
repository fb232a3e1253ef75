// Sums of squares of 64-element blocks, in the halving tree of block_sums_of_squares in poplar/ops.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "poplar/elementwise.h"

namespace poplar::cuda {

constexpr std::int64_t kBlock = 64;

// Called by whole warps. Each thread holds `kCount` consecutive values, which begin at `first`: a
// multiple of `kCount` and, for the warp's first thread, of 64. Values past `numel` are zeros. Tree
// levels with distances of 32 down to `kCount` elements are between threads, smaller ones within a
// thread.
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

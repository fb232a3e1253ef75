// Contract: exact_sum_ in poplar/ops.
#pragma once

#include "launch.cuh"
#include "poplar/exact_sum.h"

namespace poplar::cuda {

// The words have constant indices, so that each thread's own words stay in registers.
template <int kPerThread>  // a template, so that any number of sources may include it
__global__ void __launch_bounds__(kThreads)
    exact_sum_kernel(unsigned long long* total, const float* values, std::int64_t numel) {
  constexpr int kCounts = kExactUsed + 1;  // and of values that are not finite
  std::int64_t own[kCounts] = {};
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * kThreads * kPerThread + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const std::int64_t place = first + static_cast<std::int64_t>(i) * kThreads;
    const ExactTerm term = exact_term(place < numel ? values[place] : 0.0f);
#pragma unroll
    for (int word = 0; word < kExactUsed; ++word) {
      own[word] += term.word == word ? term.low : 0;
      own[word] += term.word + 1 == word ? term.high : 0;
    }
    own[kExactUsed] += !term.is_finite;
  }
#pragma unroll
  for (int count = 0; count < kCounts; ++count) {
    for (int distance = 16; distance > 0; distance /= 2) {
      own[count] += __shfl_xor_sync(0xffffffffu, own[count], distance);
    }
    if (threadIdx.x % 32 == 0 && own[count] != 0) {  // in any order: integers
      atomicAdd(total + (count < kExactUsed ? count : kExactNotFinite),
                static_cast<unsigned long long>(own[count]));
    }
  }
}

inline cudaError_t exact_sum(std::int64_t* total, const float* values, std::int64_t numel,
                             cudaStream_t stream) {
  constexpr int kPerThread = 16;
  return launch(exact_sum_kernel<kPerThread>, numel, kThreads * kPerThread, stream,
                reinterpret_cast<unsigned long long*>(total), values, numel);
}

}  // namespace poplar::cuda

// Contract: block_sums_of_squares in poplar/ops.
#pragma once

#include "block_sums.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace poplar::cuda {

template <typename Flat>
__global__ void __launch_bounds__(kThreads)
    block_sums_kernel(float* sums, const Flat* flat, std::int64_t numel, bool aligned) {
  constexpr int kCount = kVector<Flat>;
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  float values[kCount];
  load(values, flat + first, numel - first, aligned);
  store_block_sums(sums, values, first, numel);
}

template <typename Flat>
cudaError_t block_sums(float* sums, const Flat* flat, std::int64_t numel, cudaStream_t stream) {
  return launch(block_sums_kernel<Flat>, numel, kThreads * kVector<Flat>, stream, sums, flat, numel,
                is_aligned<kVector<Flat>>(flat));
}

}  // namespace poplar::cuda

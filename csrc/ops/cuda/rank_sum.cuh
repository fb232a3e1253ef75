// What every rank sent, summed in rank order. Contract: rank_sum_ in poplar/ops.
#pragma once

#include "block_sums.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace poplar::cuda {

// Ranks' parts begin `distance` elements apart. A thread takes neighbouring elements: the ranks'
// parts are read side by side, coalesced, and added in order.
template <typename Received, bool kAccumulate>
__global__ void __launch_bounds__(kThreads)
    rank_sum_kernel(float* out, float* sums, const Received* received, std::int64_t distance,
                    std::int64_t ranks, std::int64_t numel, bool aligned) {
  constexpr int kCount = kVector<Received>;
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  const std::int64_t count = numel - first;
  float total[kCount];
  load(total, received + first, count, aligned);
#pragma unroll 4
  for (std::int64_t rank = 1; rank < ranks; ++rank) {
    float part[kCount];
    load(part, received + rank * distance + first, count, aligned);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      total[i] += part[i];
    }
  }
  if constexpr (kAccumulate) {
    float old[kCount];
    load(old, out + first, count, aligned);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      total[i] = old[i] + total[i];
    }
  }
  store(out + first, total, count, aligned);
  if (sums != nullptr) {
    store_block_sums(sums, total, first, numel);
  }
}

// `sums` may be null.
template <typename Received>
cudaError_t rank_sum(float* out, float* sums, const Received* received, std::int64_t distance,
                     std::int64_t ranks, std::int64_t numel, bool accumulate, cudaStream_t stream) {
  constexpr int kCount = kVector<Received>;
  const bool aligned =
      is_aligned<kCount>(out) && is_aligned<kCount>(received) && distance % kCount == 0;
  const auto kernel =
      accumulate ? rank_sum_kernel<Received, true> : rank_sum_kernel<Received, false>;
  return launch(kernel, numel, kThreads * kCount, stream, out, sums, received, distance, ranks,
                numel, aligned);
}

}  // namespace poplar::cuda

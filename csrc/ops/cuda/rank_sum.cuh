// What every rank sent, summed in rank order. Contract: rank_sum_ in poplar/ops.
#pragma once

#include "segments.cuh"

namespace poplar::cuda {

// Ranks' parts begin `distance` elements apart. One thread per element: the ranks' parts are read
// side by side, coalesced, and added in order.
template <typename Received, bool kAccumulate>
__global__ void __launch_bounds__(kThreads)
    rank_sum_kernel(float* out, const Received* received, std::int64_t distance, std::int64_t ranks,
                    std::int64_t numel) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= numel) {
    return;
  }
  float total = widen(received[i]);
#pragma unroll 4
  for (std::int64_t rank = 1; rank < ranks; ++rank) {
    total += widen(received[rank * distance + i]);
  }
  if constexpr (kAccumulate) {
    total = out[i] + total;
  }
  out[i] = total;
}

template <typename Received>
cudaError_t rank_sum(float* out, const Received* received, std::int64_t distance,
                     std::int64_t ranks, std::int64_t numel, bool accumulate, cudaStream_t stream) {
  if (numel == 0) {
    return cudaSuccess;
  }
  const unsigned blocks = static_cast<unsigned>((numel + kThreads - 1) / kThreads);
  const auto kernel =
      accumulate ? rank_sum_kernel<Received, true> : rank_sum_kernel<Received, false>;
  kernel<<<blocks, kThreads, 0, stream>>>(out, received, distance, ranks, numel);
  return cudaGetLastError();
}

}  // namespace poplar::cuda

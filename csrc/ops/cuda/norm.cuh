// Sums of squares of 64-element blocks, in the halving tree of block_sums_of_squares in
// poplar/ops: one warp per block, lane l first adds elements l and l + 32, then shuffles halve.
#pragma once

#include "segments.cuh"

namespace poplar::cuda {

constexpr int kBlock = 64;
constexpr int kWarp = 32;
constexpr int kBlocksPerLaunchBlock = kThreads / kWarp;

template <typename Flat>
__global__ void __launch_bounds__(kThreads)
    block_sums_kernel(float* sums, const Flat* flat, std::int64_t numel, std::int64_t blocks) {
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * kBlocksPerLaunchBlock +
                             static_cast<std::int64_t>(threadIdx.x / kWarp);
  if (block >= blocks) {
    return;  // a whole warp at a time, so the shuffles below have all their lanes
  }
  const int lane = threadIdx.x % kWarp;
  const std::int64_t low = block * kBlock + lane;
  const std::int64_t high = low + kWarp;
  float sum = (low < numel ? square(widen(flat[low])) : 0.0f) +
              (high < numel ? square(widen(flat[high])) : 0.0f);
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, half);
  }
  if (lane == 0) {
    sums[block] = sum;
  }
}

template <typename Flat>
cudaError_t block_sums(float* sums, const Flat* flat, std::int64_t numel, cudaStream_t stream) {
  if (numel == 0) {
    return cudaSuccess;
  }
  const std::int64_t blocks = (numel + kBlock - 1) / kBlock;
  const unsigned grid =
      static_cast<unsigned>((blocks + kBlocksPerLaunchBlock - 1) / kBlocksPerLaunchBlock);
  block_sums_kernel<Flat><<<grid, kThreads, 0, stream>>>(sums, flat, numel, blocks);
  return cudaGetLastError();
}

}  // namespace poplar::cuda

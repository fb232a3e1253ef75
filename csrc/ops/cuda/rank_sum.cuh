// Sums the ranks' parts in rank order. Contract: rank_sum_ in poplar/ops.
#pragma once

#include <algorithm>
#include <vector>

#include "block_sums.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace poplar::cuda {

// The maximum number of parts in one launch: 2 KB of kernel parameters.
constexpr std::size_t kParts = 256;

template <typename Received>
struct PartTable {
  const Received* data[kParts];
  int count;
};

// A thread processes consecutive elements; the parts are read in parallel, coalesced, and added in
// order. `begun`, if not null, is the sum of earlier launches.
template <typename Received, bool kAccumulate>
__global__ void __launch_bounds__(kThreads)
    rank_sum_kernel(float* out, float* sums, const float* begun,
                    const __grid_constant__ PartTable<Received> parts, std::int64_t numel,
                    bool aligned) {
  constexpr int kCount = kVector<Received>;
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  const std::int64_t count = numel - first;
  float total[kCount];
  if (begun != nullptr) {
    load(total, begun + first, count, aligned);
  } else {
    load(total, parts.data[0] + first, count, aligned);
  }
#pragma unroll 4
  for (int rank = begun != nullptr ? 0 : 1; rank < parts.count; ++rank) {
    float part[kCount];
    load(part, parts.data[rank] + first, count, aligned);
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

// `sums` may be null. `begun`: memory for `numel` elements, needed with more than kParts parts.
template <typename Received>
cudaError_t rank_sum(float* out, float* sums, const std::vector<const Received*>& parts,
                     float* begun, std::int64_t numel, bool accumulate, cudaStream_t stream) {
  constexpr int kCount = kVector<Received>;
  const bool aligned = is_aligned<kCount>(out) && is_aligned<kCount>(begun) &&
                       std::all_of(parts.begin(), parts.end(),
                                   [](const Received* part) { return is_aligned<kCount>(part); });
  for (std::size_t first = 0; first < parts.size(); first += kParts) {
    const std::size_t end = std::min(first + kParts, parts.size());
    PartTable<Received> table;
    table.count = static_cast<int>(end - first);
    std::copy(parts.begin() + first, parts.begin() + end, table.data);
    const float* before = first == 0 ? nullptr : begun;
    const bool is_last = end == parts.size();
    const auto kernel =
        is_last && accumulate ? rank_sum_kernel<Received, true> : rank_sum_kernel<Received, false>;
    const cudaError_t error =
        launch(kernel, numel, kThreads * kCount, stream, is_last ? out : begun,
               is_last ? sums : nullptr, before, table, numel, aligned);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace poplar::cuda

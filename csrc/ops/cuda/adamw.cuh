// AdamW on many flat shards; everything is read and written once. Contract: adamw_ in poplar/ops.
#pragma once

#include "launch.cuh"
#include "lists.cuh"
#include "poplar/adamw.h"
#include "poplar/segments.h"
#include "vector.cuh"

namespace poplar::cuda {

struct Shard {
  float* values;
  const float* gradient;
  float* mean;
  float* square_mean;
  void* rounded;  // may be null
  std::int64_t numel;
  AdamW rule;
  Dtype dtype;  // of `rounded`
  bool aligned;
};

POPLAR_HOST_DEVICE bool is_aligned(const Shard& shard) {
  constexpr int kCount = kVector<float>;
  const bool rounded_is = shard.dtype == Dtype::kFloat
                              ? is_aligned<kCount>(static_cast<const float*>(shard.rounded))
                              : is_aligned<kCount>(static_cast<const Half*>(shard.rounded));
  return is_aligned<kCount>(shard.values) && is_aligned<kCount>(shard.gradient) &&
         is_aligned<kCount>(shard.mean) && is_aligned<kCount>(shard.square_mean) && rounded_is;
}

// Takes over what was written to the low-precision copy since the last step.
template <int kCount>
__device__ void take_written(const Shard& shard, std::int64_t first, float (&values)[kCount],
                             std::int64_t count) {
  with_type(shard.dtype, [&](auto* type) {
    using Low = std::remove_pointer_t<decltype(type)>;
    float low[kCount];
    load(low, static_cast<const Low*>(shard.rounded) + first, count, shard.aligned);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = value_behind<Low>(values[i], low[i]);
    }
  });
}

template <int kCount>
__device__ void store_rounded(const Shard& shard, std::int64_t first, const float (&values)[kCount],
                              std::int64_t count) {
  with_type(shard.dtype, [&](auto* type) {
    store(static_cast<decltype(type)>(shard.rounded) + first, values, count, shard.aligned);
  });
}

// `scale` and `found_inf` are scalars on the device, so the host does not wait for them. Each may
// be null.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ ItemTable<Shard> table, const float* scale,
                 const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) {
    return;
  }
  const int number = item_of(table, blockIdx.x);
  const Shard& shard = table.items[number];
  AdamW rule = shard.rule;
  if (scale != nullptr) {
    rule.scale *= *scale;
  }
  const std::int64_t tile = blockIdx.x - table.first_blocks[number];
  const std::int64_t first = (tile * kThreads + threadIdx.x) * kCount;
  const std::int64_t count = shard.numel - first;
  const bool aligned = shard.aligned;
  float values[kCount], gradient[kCount], mean[kCount], square_mean[kCount];
  load(values, shard.values + first, count, aligned);
  load(gradient, shard.gradient + first, count, aligned);
  load(mean, shard.mean + first, count, aligned);
  load(square_mean, shard.square_mean + first, count, aligned);
  if (shard.rounded != nullptr) {
    take_written(shard, first, values, count);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = rule.update(values[i], gradient[i], mean[i], square_mean[i]);
  }
  store(shard.mean + first, mean, count, aligned);
  store(shard.square_mean + first, square_mean, count, aligned);
  store(shard.values + first, values, count, aligned);
  if (shard.rounded != nullptr) {
    store_rounded(shard, first, values, count);
  }
}

inline cudaError_t adamw(const std::vector<Shard>& shards, const float* scale,
                         const float* found_inf, cudaStream_t stream) {
  constexpr int kCount = kVector<float>;
  return for_each_item_table(
      shards, kThreads * kCount, [&](const ItemTable<Shard>& table, std::int64_t blocks) {
        return launch(adamw_kernel<kCount>, blocks, 1, stream, table, scale, found_inf);
      });
}

}  // namespace poplar::cuda

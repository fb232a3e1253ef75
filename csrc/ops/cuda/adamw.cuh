// AdamW on a flat shard; everything is read and written once. Contract: adamw_ in poplar/ops.
#pragma once

#include "launch.cuh"
#include "poplar/adamw.h"
#include "vector.cuh"

namespace poplar::cuda {

struct Shard {
  float* values;
  const float* gradient;
  float* mean;
  float* square_mean;
  std::int64_t numel;
};

// `scale` and `found_inf` are scalars on the device, so the host does not wait for them. Each may
// be null, and so may `rounded`.
template <typename Rounded>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(Shard shard, Rounded* rounded, AdamW rule, const float* scale,
                 const float* found_inf, bool aligned) {
  if (found_inf != nullptr && *found_inf != 0.0f) {
    return;
  }
  if (scale != nullptr) {
    rule.scale *= *scale;
  }
  constexpr int kCount = kVector<float>;
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  const std::int64_t count = shard.numel - first;
  float values[kCount], gradient[kCount], mean[kCount], square_mean[kCount];
  load(values, shard.values + first, count, aligned);
  load(gradient, shard.gradient + first, count, aligned);
  load(mean, shard.mean + first, count, aligned);
  load(square_mean, shard.square_mean + first, count, aligned);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = rule.update(values[i], gradient[i], mean[i], square_mean[i]);
  }
  store(shard.mean + first, mean, count, aligned);
  store(shard.square_mean + first, square_mean, count, aligned);
  store(shard.values + first, values, count, aligned);
  if (rounded != nullptr) {
    store(rounded + first, values, count, aligned);
  }
}

template <typename Rounded>
cudaError_t adamw(const Shard& shard, Rounded* rounded, const AdamW& rule, const float* scale,
                  const float* found_inf, cudaStream_t stream) {
  constexpr int kCount = kVector<float>;
  const bool aligned = is_aligned<kCount>(shard.values) && is_aligned<kCount>(shard.gradient) &&
                       is_aligned<kCount>(shard.mean) && is_aligned<kCount>(shard.square_mean) &&
                       is_aligned<kCount>(rounded);
  return launch(adamw_kernel<Rounded>, shard.numel, kThreads * kCount, stream, shard, rounded, rule,
                scale, found_inf, aligned);
}

}  // namespace poplar::cuda

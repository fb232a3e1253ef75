// Many gradients -> one bucket, times a weight. Contract: pack_ in poplar/ops.
#pragma once

#include "segments.cuh"

namespace poplar::cuda {

template <typename Bucket, bool kAccumulate>
struct PackTile {
  Bucket* bucket;
  const SegmentTable<const void*>& table;
  float weight;

  __device__ void gap(std::int64_t begin, std::int64_t end) const {
    if constexpr (!kAccumulate) {
      for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
        bucket[i] = narrow<Bucket>(0.0f);
      }
    }
  }

  template <typename Gradient>
  __device__ void run(const void* data, std::int64_t start, std::int64_t begin,
                      std::int64_t end) const {
    const Gradient* gradient = static_cast<const Gradient*>(data) + start;
    Bucket* out = bucket + begin;
    const std::int64_t count = end - begin;
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
      if constexpr (kAccumulate) {
        out[i] = add_weighted(out[i], weight, gradient[i]);
      } else {
        out[i] = weighted<Bucket>(weight, gradient[i]);
      }
    }
  }

  __device__ void piece(std::int64_t segment, std::int64_t start, std::int64_t begin,
                        std::int64_t end) const {
    switch (table.dtypes[segment]) {
      case Dtype::kFloat:
        return run<float>(table.data[segment], start, begin, end);
      case Dtype::kBFloat16:
        return run<BFloat16>(table.data[segment], start, begin, end);
      case Dtype::kHalf:
        return run<Half>(table.data[segment], start, begin, end);
    }
  }
};

template <typename Bucket, bool kAccumulate>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(Bucket* bucket, const __grid_constant__ SegmentTable<const void*> table,
                float weight) {
  walk_tile(table, PackTile<Bucket, kAccumulate>{bucket, table, weight});
}

template <typename Bucket>
cudaError_t pack(Bucket* bucket, std::int64_t numel, const std::vector<std::int64_t>& offsets,
                 const std::vector<std::int64_t>& numels, const std::vector<const void*>& data,
                 const std::vector<Dtype>& dtypes, float weight, bool accumulate,
                 cudaStream_t stream) {
  return for_each_table(numel, offsets, numels, data, dtypes,
                        [&](unsigned blocks, const SegmentTable<const void*>& table) {
                          const auto kernel =
                              accumulate ? pack_kernel<Bucket, true> : pack_kernel<Bucket, false>;
                          kernel<<<blocks, kThreads, 0, stream>>>(bucket, table, weight);
                          return cudaGetLastError();
                        });
}

}  // namespace poplar::cuda

// Packs many gradients into one bucket, times a weight. Contract: pack_ in poplar/ops.
#pragma once

#include "segments.cuh"
#include "vector.cuh"

namespace poplar::cuda {

// A tile with several gradients, or none: element by element, into shared memory.
template <typename Bucket, bool kAccumulate>
struct MixedTile {
  const Bucket* bucket;
  const SegmentTable& table;
  float weight;
  std::int64_t first;  // of the tile
  float* staged;       // the tile's new values

  __device__ void gap(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      staged[i - first] = kAccumulate ? widen(bucket[i]) : 0.0f;
    }
  }

  template <typename Gradient>
  __device__ void run(const void* data, std::int64_t start, std::int64_t begin,
                      std::int64_t end) const {
    const Gradient* gradient = static_cast<const Gradient*>(data) + (start - begin);
#pragma unroll 4
    for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      if constexpr (kAccumulate) {
        staged[i - first] = widen(add_weighted(bucket[i], weight, gradient[i]));
      } else {
        staged[i - first] = widen(weighted<Bucket>(weight, gradient[i]));
      }
    }
  }

  __device__ void piece(std::int64_t segment, std::int64_t start, std::int64_t begin,
                        std::int64_t end) const {
    with_type(table.dtypes[segment], [&](auto* type) {
      run<std::remove_pointer_t<decltype(type)>>(table.data[segment], start, begin, end);
    });
  }
};

// Finds the gradient that covers the whole tile, if there is one.
struct WholeTile {
  std::int64_t* segment;
  std::int64_t* start;
  const Tile& tile;

  POPLAR_HOST_DEVICE void gap(std::int64_t, std::int64_t) const {}
  POPLAR_HOST_DEVICE void piece(std::int64_t number, std::int64_t begin_in_segment,
                                std::int64_t begin, std::int64_t end) const {
    if (begin == tile.begin && end == tile.end) {
      *segment = number;
      *start = begin_in_segment;
    }
  }
};

// A tile of one gradient, several elements at a time, from global memory to global memory.
template <typename Bucket, typename Gradient, bool kAccumulate>
__device__ void pack_whole(Bucket* bucket, const Gradient* gradient, float weight, const Tile& tile,
                           bool aligned) {
  constexpr int kCount = kVector<Bucket>;
  const bool gradient_aligned = is_aligned<kCount>(gradient);
#pragma unroll 2
  for (std::int64_t i = threadIdx.x * kCount; i < kTile; i += kThreads * kCount) {
    const std::int64_t first = tile.begin + i;
    const std::int64_t count = tile.end - first;
    float values[kCount], old[kCount];
    load(values, gradient + i, count, gradient_aligned);
    if constexpr (kAccumulate) {
      load(old, bucket + first, count, aligned);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float product = weight * values[k];
      values[k] = kAccumulate ? old[k] + product : product;
    }
    store(bucket + first, values, count, aligned);
  }
}

template <typename Bucket, bool kAccumulate>
__device__ void pack_mixed(Bucket* bucket, const SegmentTable& table, float weight,
                           const Tile& tile, bool aligned) {
  __shared__ float staged[kTile];
  constexpr int kCount = kVector<Bucket>;
  walk_tile(table, tile, MixedTile<Bucket, kAccumulate>{bucket, table, weight, tile.begin, staged});
  __syncthreads();
  for (std::int64_t i = threadIdx.x * kCount; i < kTile; i += kThreads * kCount) {
    const std::int64_t first = tile.begin + i;
    const std::int64_t count = tile.end - first;
    float values[kCount];
    load(values, staged + i, count, false);
    store(bucket + first, values, count, aligned);
  }
}

template <typename Bucket, bool kAccumulate>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(Bucket* bucket, const __grid_constant__ SegmentTable table, float weight,
                bool aligned) {
  const Tile tile = tile_of(table, blockIdx.x);
  std::int64_t segment = -1;
  std::int64_t start = 0;
  walk_tile(table, tile, WholeTile{&segment, &start, tile});
  if (segment < 0) {
    return pack_mixed<Bucket, kAccumulate>(bucket, table, weight, tile, aligned);
  }
  with_type(table.dtypes[segment], [&](auto* type) {
    using Gradient = std::remove_pointer_t<decltype(type)>;
    pack_whole<Bucket, Gradient, kAccumulate>(
        bucket, static_cast<const Gradient*>(table.data[segment]) + start, weight, tile, aligned);
  });
}

template <typename Bucket>
cudaError_t pack(Bucket* bucket, std::int64_t numel, const std::vector<std::int64_t>& offsets,
                 const std::vector<std::int64_t>& numels, const std::vector<const void*>& data,
                 const std::vector<Dtype>& dtypes, float weight, bool accumulate,
                 cudaStream_t stream) {
  const bool aligned = is_aligned<kVector<Bucket>>(bucket);
  return for_each_table(numel, offsets, numels, data, dtypes, [&](const SegmentTable& table) {
    const auto kernel = accumulate ? pack_kernel<Bucket, true> : pack_kernel<Bucket, false>;
    return launch(kernel, table.end - table.begin, kTile, stream, bucket, table, weight, aligned);
  });
}

}  // namespace poplar::cuda

// Copies one flat buffer into many tensors, each in its own dtype. Contract: unpack_ in poplar/ops.
#pragma once

#include "segments.cuh"

namespace poplar::cuda {

template <typename Flat>
struct UnpackTile {
  const Flat* flat;
  const SegmentTable<void*>& table;

  __device__ void gap(std::int64_t, std::int64_t) const {}

  template <typename Out>
  __device__ void run(void* data, std::int64_t start, std::int64_t begin, std::int64_t end) const {
    Out* out = static_cast<Out*>(data) + start;
    const Flat* source = flat + begin;
    const std::int64_t count = end - begin;
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
      out[i] = narrow<Out>(widen(source[i]));
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

template <typename Flat>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const Flat* flat, const __grid_constant__ SegmentTable<void*> table) {
  walk_tile(table, tile_of(table, blockIdx.x), UnpackTile<Flat>{flat, table});
}

template <typename Flat>
cudaError_t unpack(const Flat* flat, std::int64_t numel, const std::vector<std::int64_t>& offsets,
                   const std::vector<std::int64_t>& numels, const std::vector<void*>& data,
                   const std::vector<Dtype>& dtypes, cudaStream_t stream) {
  return for_each_table(
      numel, offsets, numels, data, dtypes, [&](const SegmentTable<void*>& table) {
        return launch(unpack_kernel<Flat>, table.end - table.begin, kTile, stream, flat, table);
      });
}

}  // namespace poplar::cuda

// Hundreds of tensors in one launch: their places travel in the kernel's parameters.
//
// Framework-free (raw pointers and a stream), as every header in this folder, so that the kernels
// compile for every architecture without a CUDA build of torch. Work is cut by position in the flat
// buffer, one tile per block, so one huge tensor and a hundred tiny ones are balanced alike.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "poplar/segments.h"

namespace poplar::cuda {

constexpr int kThreads = 256;
constexpr std::int64_t kTile = 4096;

// 640 x 25 bytes = 16 KB of the 32,764 that parameters may have (CUDA 12.1, compute
// capability 7.0).
constexpr int kSegments = 640;

template <typename Pointer>
struct SegmentTable {
  std::int64_t begin;  // the part of the flat buffer that this launch covers
  std::int64_t end;
  std::int64_t offsets[kSegments];
  std::int64_t numels[kSegments];
  Pointer data[kSegments];
  Dtype dtypes[kSegments];
  int count;
};

static_assert(sizeof(SegmentTable<void*>) + 64 <= 32764, "kernel parameters are limited");

// Calls launch(blocks, table), which returns its error, once per kSegments tensors, covering [0,
// numel) exactly once. With none there is still one launch: a bucket without tensors has a gap to
// fill.
template <typename Pointer, typename Launch>
cudaError_t for_each_table(std::int64_t numel, const std::vector<std::int64_t>& offsets,
                           const std::vector<std::int64_t>& numels,
                           const std::vector<Pointer>& data, const std::vector<Dtype>& dtypes,
                           const Launch& launch) {
  SegmentTable<Pointer> table;
  const std::int64_t segments = static_cast<std::int64_t>(data.size());
  std::int64_t first = 0;
  std::int64_t begin = 0;
  do {
    const std::int64_t last = std::min<std::int64_t>(first + kSegments, segments);
    table.begin = begin;
    table.end = last < segments ? offsets[last] : numel;
    table.count = static_cast<int>(last - first);
    std::copy(offsets.begin() + first, offsets.begin() + last, table.offsets);
    std::copy(numels.begin() + first, numels.begin() + last, table.numels);
    std::copy(data.begin() + first, data.begin() + last, table.data);
    std::copy(dtypes.begin() + first, dtypes.begin() + last, table.dtypes);
    if (table.begin < table.end) {
      const cudaError_t error =
          launch(static_cast<unsigned>((table.end - table.begin + kTile - 1) / kTile), table);
      if (error != cudaSuccess) {
        return error;
      }
    }
    begin = table.end;
    first = last;
  } while (first < segments);
  return cudaSuccess;
}

// Walks over this block's tile.
template <typename Pointer, typename Visitor>
__device__ __forceinline__ void walk_tile(const SegmentTable<Pointer>& table,
                                          const Visitor& visitor) {
  const std::int64_t begin = table.begin + static_cast<std::int64_t>(blockIdx.x) * kTile;
  const std::int64_t end = begin + kTile < table.end ? begin + kTile : table.end;
  walk(table.offsets, table.numels, table.count, begin, end, visitor);
}

}  // namespace poplar::cuda

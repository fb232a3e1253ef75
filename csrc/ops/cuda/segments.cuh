// Hundreds of tensors in one launch: their addresses are kernel parameters.
//
// Work is divided by position in the flat buffer, one tile per thread block, so one huge tensor and
// a hundred tiny ones are balanced equally.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "block_sums.cuh"
#include "launch.cuh"
#include "poplar/segments.h"

namespace poplar::cuda {

constexpr std::int64_t kTile = 4096;
static_assert(kTile % kBlock == 0);

// 640 x 25 bytes = 16 KB of the 32,764 bytes of kernel parameters (CUDA 12.1, compute capability
// 7.0).
constexpr int kSegments = 640;

struct SegmentTable {
  std::int64_t begin;  // the part of the flat buffer that this launch covers
  std::int64_t end;
  std::int64_t offsets[kSegments];
  std::int64_t numels[kSegments];
  const void* data[kSegments];
  Dtype dtypes[kSegments];
  int count;
};

static_assert(sizeof(SegmentTable) + 64 <= 32764, "kernel parameters are limited");

// Calls launch(table), which returns an error code, for consecutive parts of [0, numel) that are
// cut at multiples of kBlock, so that vector accesses stay aligned. A tensor that is cut appears in
// two tables. Without tensors there is one launch, which fills the bucket with zeros.
template <typename Launch>
cudaError_t for_each_table(std::int64_t numel, const std::vector<std::int64_t>& offsets,
                           const std::vector<std::int64_t>& numels,
                           const std::vector<const void*>& data, const std::vector<Dtype>& dtypes,
                           const Launch& launch) {
  SegmentTable table;
  const std::size_t segments = data.size();
  std::size_t first = 0;
  table.end = 0;
  while (table.end < numel) {
    table.begin = table.end;
    while (first < segments && offsets[first] + numels[first] <= table.begin) {
      ++first;
    }
    table.count = 0;
    std::size_t next = first;
    for (; next < segments && table.count < kSegments; ++next) {
      if (numels[next] == 0) {
        continue;  // a table full of empty tensors would cover nothing
      }
      table.offsets[table.count] = offsets[next];
      table.numels[table.count] = numels[next];
      table.data[table.count] = data[next];
      table.dtypes[table.count] = dtypes[next];
      ++table.count;
    }
    table.end = next < segments ? offsets[next] / kBlock * kBlock : numel;
    const cudaError_t error = launch(static_cast<const SegmentTable&>(table));
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

// The part of the buffer that one thread block processes.
struct Tile {
  std::int64_t begin;
  std::int64_t end;
};

POPLAR_HOST_DEVICE Tile tile_of(const SegmentTable& table, std::int64_t block) {
  const std::int64_t begin = table.begin + block * kTile;
  return Tile{begin, begin + kTile < table.end ? begin + kTile : table.end};
}

// Walks over the segments and gaps of the tile.
template <typename Visitor>
POPLAR_HOST_DEVICE void walk_tile(const SegmentTable& table, const Tile& tile,
                                  const Visitor& visitor) {
  walk(table.offsets, table.numels, table.count, tile.begin, tile.end, visitor);
}

}  // namespace poplar::cuda

// Where many tensors lie in one flat buffer, and how a range of the buffer walks over them.
//
// The same walk serves a CPU thread's range and a CUDA block's tile, so work is cut by position in
// the buffer, evenly, whatever the tensors' sizes. Always holds: segments ascend and don't overlap,
// and a walk visits every element of its range exactly once, as part of a segment or of a gap.
#pragma once

#include <cstdint>

#include "poplar/elementwise.h"

namespace poplar {

enum class Dtype : std::uint8_t { kFloat, kBFloat16, kHalf };

// Calls visitor.gap(begin, end) and visitor.piece(segment, start in the segment, begin, end) for
// what [begin, end) of the buffer consists of, in order. `offsets` and `numels` hold `count`
// segments, ascending.
template <typename Visitor>
POPLAR_HOST_DEVICE void walk(const std::int64_t* offsets, const std::int64_t* numels,
                             std::int64_t count, std::int64_t begin, std::int64_t end,
                             const Visitor& visitor) {
  // The first segment that ends after `begin`: empty ones before it are skipped on the way.
  std::int64_t low = 0;
  std::int64_t high = count;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (offsets[middle] + numels[middle] <= begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  std::int64_t position = begin;
  for (std::int64_t segment = low; segment < count && position < end; ++segment) {
    const std::int64_t start = offsets[segment];
    const std::int64_t stop = start + numels[segment];
    if (start >= end) {
      break;
    }
    if (position < start) {
      visitor.gap(position, start);
      position = start;
    }
    const std::int64_t piece_end = stop < end ? stop : end;
    if (position < piece_end) {
      visitor.piece(segment, position - start, position, piece_end);
      position = piece_end;
    }
  }
  if (position < end) {
    visitor.gap(position, end);
  }
}

}  // namespace poplar

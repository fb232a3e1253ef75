// Tensors in one flat buffer, and the walk over the tensors within a range of the buffer.
//
// A CPU thread's range and a CUDA block's tile use the same walk, so work is divided evenly by
// position in the buffer, independent of the sizes of the tensors. Segments ascend and don't
// overlap, and a walk visits every element of its range exactly once, as part of a segment or of a
// gap.
#pragma once

#include <cstdint>

#include "poplar/elementwise.h"

namespace poplar {

enum class Dtype : std::uint8_t { kFloat, kBFloat16, kHalf };

// Calls function(T*) with a null pointer of the dtype's C++ type. On the host and on the device,
// depending on the function.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename Function>
POPLAR_HOST_DEVICE void with_type(Dtype dtype, const Function& function) {
  switch (dtype) {
    case Dtype::kFloat:
      return function(static_cast<float*>(nullptr));
    case Dtype::kBFloat16:
      return function(static_cast<BFloat16*>(nullptr));
    case Dtype::kHalf:
      return function(static_cast<Half*>(nullptr));
  }
}

// Calls visitor.gap(begin, end) and visitor.piece(segment, start in the segment, begin, end) for
// the parts of [begin, end), in order. `offsets` and `numels` hold `count` ascending segments.
template <typename Visitor>
POPLAR_HOST_DEVICE void walk(const std::int64_t* offsets, const std::int64_t* numels,
                             std::int64_t count, std::int64_t begin, std::int64_t end,
                             const Visitor& visitor) {
  // Binary search for the first segment that ends after `begin`; this skips empty segments before
  // it.
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

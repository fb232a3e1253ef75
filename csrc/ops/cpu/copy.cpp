// Copies a flat tensor into another of the same dtype, with the fastest stores for its size.
#include <algorithm>
#include <cstring>

#include "../checks.h"
#include "kernels.h"
#include "parallel.h"
#include "stream.h"

namespace poplar::cpu {

void copy_(Tensor target, Tensor source) {
  check_copy(target, source);
  const std::int64_t bytes = target.numel() * static_cast<std::int64_t>(target.element_size());
  char* to = static_cast<char*>(target.mutable_data_ptr());
  const char* from = static_cast<const char*>(source.const_data_ptr());
  const bool streams = can_stream(to, bytes);
  // Threads copy multiples of a streaming store; the rest is copied afterwards.
  const std::int64_t pieces = bytes / kStreamWidth;
  parallel(pieces, kGrain / 4, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t start = begin * kStreamWidth;
    const std::int64_t count = (end - begin) * kStreamWidth;
    if (streams) {
      stream(to + start, from + start, count);
      end_streaming();
    } else {
      std::memcpy(to + start, from + start, static_cast<std::size_t>(count));
    }
  });
  const std::int64_t done = pieces * kStreamWidth;
  std::memcpy(to + done, from + done, static_cast<std::size_t>(bytes - done));
}

}  // namespace poplar::cpu

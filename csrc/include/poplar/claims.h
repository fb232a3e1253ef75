// Work on one slice, shared by whoever has time: chunks are claimed one by one, by any process.
//
// Always holds: every chunk is worked on exactly once, and who has waited until all are done sees
// what the workers wrote. All zeros is nothing claimed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "poplar/counter.h"

namespace poplar {

struct Claims {
  std::atomic<std::uint32_t> claimed;
  std::uint32_t padding;
  Counter done;
};
static_assert(sizeof(Claims) == 16);

// Elements of a chunk: 256 KiB of fp32, some 20 microseconds of work, so whoever waits for the last
// one waits for no longer unless its worker lost its core.
constexpr std::int64_t kChunk = std::int64_t{1} << 16;

inline std::int64_t chunks_of(std::int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// Claim the next chunk of `numel` elements and call work(begin, end) on it; false if none is left.
template <typename Work>
bool work_on_next(Claims& claims, std::int64_t numel, const Work& work) {
  const std::int64_t chunks = chunks_of(numel);
  // Asked first: the count must not run on, however often somebody comes by.
  if (claims.claimed.load(std::memory_order_relaxed) >= chunks) {
    return false;
  }
  const std::int64_t chunk = claims.claimed.fetch_add(1, std::memory_order_relaxed);
  if (chunk >= chunks) {
    return false;
  }
  work(chunk * kChunk, std::min((chunk + 1) * kChunk, numel));
  increase(claims.done);
  return true;
}

}  // namespace poplar

// Work sharing on one slice: processes take chunks one by one from shared counters.
//
// Every chunk is processed exactly once, and a process that has waited until all are done sees all
// results. Zeros mean that no chunk has been started.
#pragma once

#include <algorithm>
#include <cstdint>

#include "poplar/counter.h"

namespace poplar {

struct WorkCounters {
  std::atomic<std::uint32_t> started;
  std::uint32_t padding;
  Counter done;
};
static_assert(sizeof(WorkCounters) == 16);

// Elements of a chunk: 256 KiB of fp32, about 20 microseconds of work. So the wait for the last
// chunk is no longer than that, unless its process loses its core.
constexpr std::int64_t kChunk = std::int64_t{1} << 16;

inline std::int64_t chunks_of(std::int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// Take the next chunk of `numel` elements and call work(begin, end) on it; false if none is left.
template <typename Work>
bool work_on_next(WorkCounters& work_counters, std::int64_t numel, const Work& work) {
  const std::int64_t chunks = chunks_of(numel);
  // Checked first, so that repeated calls do not overflow the counter.
  if (work_counters.started.load(std::memory_order_relaxed) >= chunks) {
    return false;
  }
  const std::int64_t chunk = work_counters.started.fetch_add(1, std::memory_order_relaxed);
  if (chunk >= chunks) {
    return false;
  }
  work(chunk * kChunk, std::min((chunk + 1) * kChunk, numel));
  increase(work_counters.done);
  return true;
}

}  // namespace poplar

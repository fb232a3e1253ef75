// When operators use streaming stores, and such stores of whole cache lines.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "poplar/stream.h"

#ifdef POPLAR_WIDE
#include <immintrin.h>
#endif

namespace poplar {

// Bytes from which on streaming is faster: smaller data may be read again before the last-level
// cache has evicted it.
constexpr std::int64_t kStreamBytes = std::int64_t{4} << 20;

// The size of a cache line.
constexpr std::int64_t kLine = 64;

inline bool can_stream(const void* target, std::int64_t bytes) {
  return bytes >= kStreamBytes && is_stream_target(target);
}

#ifdef POPLAR_WIDE
// As `stream`, with whole cache lines: `target` and `bytes` must be multiples of kLine.
POPLAR_WIDE inline __attribute__((always_inline)) void stream_lines(void* target,
                                                                    const void* source,
                                                                    std::int64_t bytes) {
  char* to = static_cast<char*>(target);
  const char* from = static_cast<const char*>(source);
  for (std::int64_t i = 0; i < bytes; i += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
  }
}
#endif

}  // namespace poplar

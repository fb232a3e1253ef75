// Non-temporal stores, which bypass the caches: for data that is written once and read much later.
//
// A normal store into a line that is not cached reads the line from memory first, so a copy moves
// three bytes for every two. On two cores of an EPYC, copies of 64 MiB reach 45 to 50 GB/s with
// streaming stores and 34 GB/s without.
#pragma once

#include <cstdint>
#include <cstring>

#include "parallel.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace poplar {

// Bytes from which on streaming is faster: smaller data may be read again before the last-level
// cache has evicted it.
constexpr std::int64_t kStreamBytes = std::int64_t{4} << 20;

// The size of a streaming store, and the alignment of its target.
constexpr std::int64_t kStreamWidth = 16;

// The size of a cache line.
constexpr std::int64_t kLine = 64;

inline bool can_stream(const void* target, std::int64_t bytes) {
#ifdef __SSE2__
  return bytes >= kStreamBytes && reinterpret_cast<std::uintptr_t>(target) % kStreamWidth == 0;
#else
  (void)target;
  (void)bytes;
  return false;
#endif
}

// `target` and `bytes` must be multiples of kStreamWidth.
inline __attribute__((always_inline)) void stream(void* target, const void* source,
                                                  std::int64_t bytes) {
#ifdef __SSE2__
  char* to = static_cast<char*>(target);
  const char* from = static_cast<const char*>(source);
  for (std::int64_t i = 0; i < bytes; i += kStreamWidth) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#else
  std::memcpy(target, source, static_cast<std::size_t>(bytes));
#endif
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

// To call after streaming, on the same thread: later stores become visible after the streamed ones.
inline void end_streaming() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace poplar

// Non-temporal stores, which bypass the caches: for data that is written once and read much later.
//
// A normal store into a line that is not cached reads the line from memory first, so a copy moves
// three bytes for every two. On two cores of an EPYC, copies of 64 MiB reach 45 to 50 GB/s with
// streaming stores and 34 GB/s without.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace poplar {

// The size of a streaming store, and the alignment of its target.
constexpr std::int64_t kStreamWidth = 16;

inline bool is_stream_target(const void* target) {
#ifdef __SSE2__
  return reinterpret_cast<std::uintptr_t>(target) % kStreamWidth == 0;
#else
  (void)target;
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

// To call after streaming, on the same thread: later stores become visible after the streamed ones.
inline void end_streaming() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace poplar

// fp16 to fp32 by the CPU's own instruction, which compilers do not generate from the portable
// code.
#pragma once

#include "block_sums.h"
#include "parallel.h"

#ifdef POPLAR_WIDE
#include <immintrin.h>

namespace poplar {

// Widens a block; exact, like the portable code. `wide` must be aligned to 64 bytes.
POPLAR_WIDE inline __attribute__((always_inline)) void widen_block(float* wide, const Half* block) {
  for (std::int64_t i = 0; i < kBlock; i += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + i));
    _mm512_store_ps(wide + i, _mm512_cvtph_ps(half));
  }
}

}  // namespace poplar
#endif

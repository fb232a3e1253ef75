// How the CPU loops are spread over torch's own threads, and compiled for the CPU at hand.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

// One function, several instruction sets, picked when the library is loaded: portable wheels that
// still use wide registers. CMake asks the compiler whether it can (GCC 12 and later with glibc on
// x86-64). Contraction is off for all clones alike, so they give the same bits.
#ifdef POPLAR_TARGET_CLONES
#define POPLAR_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define POPLAR_CLONES
#endif

namespace poplar {

// Elements below which a thread of its own costs more than it saves: 128 KiB of fp32.
constexpr std::int64_t kGrain = 32768;

template <typename Function>
void parallel(std::int64_t count, std::int64_t grain, const Function& function) {
  if (count <= grain) {
    if (count > 0) {
      function(std::int64_t{0}, count);
    }
    return;
  }
  torch::stable::parallel_for(0, count, grain, function);
}

}  // namespace poplar

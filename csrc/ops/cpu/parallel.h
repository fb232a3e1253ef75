// Parallel CPU loops on torch's own threads, compiled for several instruction sets.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

// One function, several instruction sets; the best one is selected when the library is loaded. So
// portable wheels still use wide registers. CMake checks that the compiler supports it (GCC 12 and
// later with glibc on x86-64). Contraction is off for all clones, so they give the same bits.
#ifdef POPLAR_TARGET_CLONES
#define POPLAR_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
// For a loop with a separate version in 64-byte registers, which compilers don't use by default.
// `has_wide_registers` selects between that version and the clones.
#define POPLAR_WIDE __attribute__((target("arch=x86-64-v4,prefer-vector-width=512")))
#else
#define POPLAR_CLONES
#endif

namespace poplar {

inline bool has_wide_registers() {
#ifdef POPLAR_WIDE
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
#else
  return false;
#endif
}

// Elements below which another thread costs more than it saves: 128 KiB of fp32.
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

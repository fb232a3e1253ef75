// Contract: exact_sum_ in poplar/ops.
#pragma once

#include "launch.cuh"
#include "lists.cuh"
#include "poplar/exact_sum.h"

namespace poplar::cuda {

struct Addends {
  const float* values;
  std::int64_t numel;
};

// The words have constant indices, so that each thread's own words stay in registers.
template <int kPerThread>  // a template, so that any number of sources may include it
__global__ void __launch_bounds__(kThreads)
    exact_sum_kernel(unsigned long long* total, const __grid_constant__ ItemTable<Addends> table) {
  constexpr int kCounts = kExactUsed + 1;  // and of values that are not finite
  std::int64_t own[kCounts] = {};
  const int number = item_of(table, blockIdx.x);
  const Addends& addends = table.items[number];
  const std::int64_t tile = blockIdx.x - table.first_blocks[number];
  const std::int64_t first = tile * kThreads * kPerThread + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const std::int64_t place = first + static_cast<std::int64_t>(i) * kThreads;
    const ExactTerm term = exact_term(place < addends.numel ? addends.values[place] : 0.0f);
#pragma unroll
    for (int word = 0; word < kExactUsed; ++word) {
      own[word] += term.word == word ? term.low : 0;
      own[word] += term.word + 1 == word ? term.high : 0;
    }
    own[kExactUsed] += !term.is_finite;
  }
#pragma unroll
  for (int count = 0; count < kCounts; ++count) {
    for (int distance = 16; distance > 0; distance /= 2) {
      own[count] += __shfl_xor_sync(0xffffffffu, own[count], distance);
    }
    if (threadIdx.x % 32 == 0 && own[count] != 0) {  // in any order: integers
      atomicAdd(total + (count < kExactUsed ? count : kExactNotFinite),
                static_cast<unsigned long long>(own[count]));
    }
  }
}

inline cudaError_t exact_sum(std::int64_t* total, const std::vector<Addends>& parts,
                             cudaStream_t stream) {
  constexpr int kPerThread = 16;
  auto* words = reinterpret_cast<unsigned long long*>(total);
  return for_each_item_table(
      parts, kThreads * kPerThread, [&](const ItemTable<Addends>& table, std::int64_t blocks) {
        return launch(exact_sum_kernel<kPerThread>, blocks, 1, stream, words, table);
      });
}

}  // namespace poplar::cuda

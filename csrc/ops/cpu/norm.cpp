// Sums of squares of aligned 64-element blocks: the leaves of the gradient norm's fixed tree.
#include <algorithm>

#include "../checks.h"
#include "kernels.h"
#include "parallel.h"

namespace poplar::cpu {
namespace {

constexpr std::int64_t kBlock = 64;

template <typename Flat>
POPLAR_HOST_DEVICE float block_sum(const Flat* block) {
  float lanes[kBlock / 2];
  for (int i = 0; i < kBlock / 2; ++i) {
    lanes[i] = square(widen(block[i])) + square(widen(block[i + kBlock / 2]));
  }
  for (int half = kBlock / 4; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      lanes[i] += lanes[i + half];
    }
  }
  return lanes[0];
}

template <typename Flat>
POPLAR_CLONES void sum_blocks(float* sums, const Flat* flat, std::int64_t blocks) {
  for (std::int64_t block = 0; block < blocks; ++block) {
    sums[block] = block_sum(flat + block * kBlock);
  }
}

}  // namespace

Tensor block_sums_of_squares(Tensor flat) {
  check_flat(flat, "block_sums_of_squares: flat");
  const std::int64_t numel = flat.numel();
  const std::int64_t whole = numel / kBlock;
  const std::int64_t tail = numel % kBlock;
  Tensor sums =
      torch::stable::new_empty(flat, {whole + (tail != 0)}, torch::headeronly::ScalarType::Float);
  float* target = static_cast<float*>(sums.mutable_data_ptr());
  with_type(dtype_of(flat, "block_sums_of_squares: flat"), [&](auto* type) {
    using Flat = std::remove_pointer_t<decltype(type)>;
    const Flat* source = static_cast<const Flat*>(flat.const_data_ptr());
    parallel(whole, kGrain / kBlock, [&](std::int64_t begin, std::int64_t end) {
      sum_blocks(target + begin, source + begin * kBlock, end - begin);
    });
    if (tail != 0) {
      Flat padded[kBlock] = {};
      std::copy_n(source + whole * kBlock, tail, padded);
      sum_blocks(target + whole, padded, 1);
    }
  });
  return sums;
}

}  // namespace poplar::cpu

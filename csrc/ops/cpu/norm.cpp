// Block sums of squares, for gradients whose sums no other operator has computed.
#include "../checks.h"
#include "block_sums.h"
#include "kernels.h"
#include "parallel.h"

namespace poplar::cpu {
namespace {

template <typename Flat>
POPLAR_CLONES void sum_range(float* sums, const Flat* flat, std::int64_t count) {
  block_sums(sums, flat, count);
}

}  // namespace

Tensor block_sums_of_squares(Tensor flat) {
  check_flat(flat, "block_sums_of_squares: flat");
  const std::int64_t numel = flat.numel();
  const std::int64_t blocks = blocks_of(numel);
  Tensor sums =
      new_empty("block_sums_of_squares", flat, {blocks}, torch::headeronly::ScalarType::Float);
  float* target = static_cast<float*>(sums.mutable_data_ptr());
  with_type(dtype_of(flat, "block_sums_of_squares: flat"), [&](auto* type) {
    using Flat = std::remove_pointer_t<decltype(type)>;
    const Flat* source = static_cast<const Flat*>(flat.const_data_ptr());
    parallel(blocks, kGrain / kBlock, [&](std::int64_t first, std::int64_t last) {
      const std::int64_t begin = first * kBlock;
      sum_range(target + first, source + begin, std::min(last * kBlock, numel) - begin);
    });
  });
  return sums;
}

}  // namespace poplar::cpu

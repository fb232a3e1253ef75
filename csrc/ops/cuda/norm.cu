#include "norm.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

Tensor block_sums_of_squares(Tensor flat) {
  check_flat(flat, "block_sums_of_squares: flat");
  const std::int64_t numel = flat.numel();
  const OnDevice device(flat);
  Tensor sums = new_empty("block_sums_of_squares", flat, {blocks_of(numel)},
                          torch::headeronly::ScalarType::Float);
  with_type(dtype_of(flat, "block_sums_of_squares: flat"), [&](auto* type) {
    using Flat = std::remove_pointer_t<decltype(type)>;
    STD_CUDA_CHECK(block_sums(static_cast<float*>(sums.mutable_data_ptr()),
                              static_cast<const Flat*>(flat.const_data_ptr()), numel,
                              device.stream()));
  });
  return sums;
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("block_sums_of_squares", POPLAR_OPERATOR(&poplar::cuda::block_sums_of_squares));
}

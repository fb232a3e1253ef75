#include "exact_sum.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

void exact_sum_(Tensor total, std::vector<Tensor> values) {
  check_exact_sum(total, values);
  const OnDevice device(total);
  std::vector<Addends> parts;
  for (const Tensor& part : values) {
    parts.push_back({static_cast<const float*>(part.const_data_ptr()), part.numel()});
  }
  STD_CUDA_CHECK(
      exact_sum(static_cast<std::int64_t*>(total.mutable_data_ptr()), parts, device.stream()));
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("exact_sum_", POPLAR_OPERATOR(&poplar::cuda::exact_sum_));
}

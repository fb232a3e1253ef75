#include "exact_sum.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

void exact_sum_(Tensor total, Tensor values) {
  check_exact_sum(total, values);
  const OnDevice device(total);
  STD_CUDA_CHECK(exact_sum(static_cast<std::int64_t*>(total.mutable_data_ptr()),
                           static_cast<const float*>(values.const_data_ptr()), values.numel(),
                           device.stream()));
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("exact_sum_", TORCH_BOX(&poplar::cuda::exact_sum_));
}

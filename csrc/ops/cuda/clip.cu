#include "clip.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

Tensor new_double_like(const char* name, const Tensor& tensor) {
  return new_empty(name, tensor, {}, torch::headeronly::ScalarType::Double);
}

Tensor exact_norm(Tensor totals) {
  check_exact_norm(totals);
  const OnDevice device(totals);
  Tensor norm = new_double_like("exact_norm", totals);
  STD_CUDA_CHECK(cuda::norm(static_cast<double*>(norm.mutable_data_ptr()),
                            static_cast<const std::int64_t*>(totals.const_data_ptr()),
                            totals.size(0), totals.size(1), device.stream()));
  return norm;
}

Tensor clip_coefficient(Tensor norm, double max_norm, std::optional<Tensor> scale) {
  check_clip_coefficient(norm, scale);
  const OnDevice device(norm);
  Tensor coefficient = new_double_like("clip_coefficient", norm);
  STD_CUDA_CHECK(cuda::clip(static_cast<double*>(coefficient.mutable_data_ptr()),
                            static_cast<const double*>(norm.const_data_ptr()),
                            scale ? static_cast<const double*>(scale->const_data_ptr()) : nullptr,
                            static_cast<float>(max_norm), device.stream()));
  return coefficient;
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("exact_norm", POPLAR_OPERATOR(&poplar::cuda::exact_norm));
  library.impl("clip_coefficient", POPLAR_OPERATOR(&poplar::cuda::clip_coefficient));
}

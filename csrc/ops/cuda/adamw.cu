#include "adamw.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

const float* scalar_of(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
}

void adamw_(std::vector<Tensor> values, std::vector<Tensor> gradients, std::vector<Tensor> means,
            std::vector<Tensor> square_means, std::vector<Tensor> rounded,
            std::vector<double> rules, std::optional<Tensor> scale,
            std::optional<Tensor> found_inf) {
  check_adamw(values, gradients, means, square_means, rounded, rules, scale, found_inf);
  if (values.empty()) {
    return;
  }
  const OnDevice device(values[0]);
  std::vector<Shard> shards(values.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const bool rounds = rounded[i].numel() != 0;
    shards[i] = Shard{static_cast<float*>(values[i].mutable_data_ptr()),
                      static_cast<const float*>(gradients[i].const_data_ptr()),
                      static_cast<float*>(means[i].mutable_data_ptr()),
                      static_cast<float*>(square_means[i].mutable_data_ptr()),
                      rounds ? rounded[i].mutable_data_ptr() : nullptr,
                      values[i].numel(),
                      AdamW(&rules[i * kRuleNumbers], 1.0f),
                      rounds ? dtype_of(rounded[i], "adamw_: rounded") : Dtype::kFloat,
                      false};
    shards[i].aligned = is_aligned(shards[i]);
  }
  STD_CUDA_CHECK(adamw(shards, scalar_of(scale), scalar_of(found_inf), device.stream()));
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("adamw_", POPLAR_OPERATOR(&poplar::cuda::adamw_));
}

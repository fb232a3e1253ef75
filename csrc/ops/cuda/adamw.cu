#include "adamw.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

const float* scalar_of(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
}

void adamw_(Tensor values, Tensor gradient, Tensor mean, Tensor square_mean,
            std::optional<Tensor> rounded, double lr, double beta1, double beta2, double eps,
            double weight_decay, double step, bool maximize, std::optional<Tensor> scale,
            std::optional<Tensor> found_inf) {
  check_adamw(values, gradient, mean, square_mean, rounded, step, scale, found_inf);
  const OnDevice device(values);
  const AdamW rule(lr, beta1, beta2, eps, weight_decay, step, maximize, 1.0f);
  const Shard shard{static_cast<float*>(values.mutable_data_ptr()),
                    static_cast<const float*>(gradient.const_data_ptr()),
                    static_cast<float*>(mean.mutable_data_ptr()),
                    static_cast<float*>(square_mean.mutable_data_ptr()), values.numel()};
  const auto run = [&](auto* target) {
    STD_CUDA_CHECK(
        adamw(shard, target, rule, scalar_of(scale), scalar_of(found_inf), device.stream()));
  };
  if (!rounded) {
    return run(static_cast<float*>(nullptr));
  }
  with_type(dtype_of(*rounded, "adamw_: rounded"),
            [&](auto* type) { run(static_cast<decltype(type)>(rounded->mutable_data_ptr())); });
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("adamw_", TORCH_BOX(&poplar::cuda::adamw_));
}

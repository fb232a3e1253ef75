// Contract: exact_norm and clip_coefficient in poplar/ops.
#include "poplar/clip.h"

#include "../checks.h"
#include "kernels.h"

namespace poplar::cpu {
namespace {

Tensor new_double_like(const char* name, const Tensor& tensor, double value) {
  Tensor result = new_empty(name, tensor, {}, torch::headeronly::ScalarType::Double);
  *static_cast<double*>(result.mutable_data_ptr()) = value;
  return result;
}

double value_of(const Tensor& tensor) {
  return *static_cast<const double*>(tensor.const_data_ptr());
}

}  // namespace

Tensor exact_norm(Tensor totals) {
  check_exact_norm(totals);
  const auto* data = static_cast<const std::int64_t*>(totals.const_data_ptr());
  std::int64_t words[kExactWords] = {};
  for (std::int64_t row = 0; row < totals.size(0); ++row) {
    for (int word = 0; word < kExactWords; ++word) {
      words[word] += data[row * totals.size(1) + word];
    }
  }
  return new_double_like("exact_norm", totals, root_of(words));
}

Tensor clip_coefficient(Tensor norm, double max_norm, std::optional<Tensor> scale) {
  check_clip_coefficient(norm, scale);
  const double factor = scale ? value_of(*scale) : 1.0;
  const float bound = static_cast<float>(max_norm);
  return new_double_like("clip_coefficient", norm, clip_ratio(value_of(norm), factor, bound));
}

}  // namespace poplar::cpu

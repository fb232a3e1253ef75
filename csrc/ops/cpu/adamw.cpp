// AdamW on many flat shards: state, values and low-precision copies are each read and written once.
#include <algorithm>
#include <cmath>

#include "../checks.h"
#include "kernels.h"
#include "lists.h"
#include "parallel.h"
#include "poplar/adamw.h"

namespace poplar::cpu {
namespace {

// Elements that are updated before they are rounded, in loops of their own from the L1 cache: GCC
// does not vectorize a single loop that rounds to fp16 (63 ms for 8 Mi elements, 8 ms with two).
constexpr std::int64_t kPiece = 256;

// `rounded` may be null.
template <typename Rounded>
POPLAR_CLONES void update(const AdamW& rule, float* __restrict values,
                          const float* __restrict gradient, float* __restrict mean,
                          float* __restrict square_mean, Rounded* __restrict rounded,
                          std::int64_t begin, std::int64_t end) {
  for (std::int64_t first = begin; first < end; first += kPiece) {
    const std::int64_t last = std::min(end, first + kPiece);
    if (rounded != nullptr) {
      for (std::int64_t i = first; i < last; ++i) {
        values[i] = value_behind<Rounded>(values[i], widen(rounded[i]));
      }
    }
    for (std::int64_t i = first; i < last; ++i) {
      values[i] = rule.update(values[i], gradient[i], mean[i], square_mean[i]);
    }
    if (rounded != nullptr) {
      for (std::int64_t i = first; i < last; ++i) {
        rounded[i] = narrow<Rounded>(values[i]);
      }
    }
  }
}

struct Shard {
  AdamW rule;
  float* values;
  const float* gradient;
  float* mean;
  float* square_mean;
  void* rounded;  // may be null
  Dtype dtype;    // of `rounded`
};

}  // namespace

void adamw_(std::vector<Tensor> values, std::vector<Tensor> gradients, std::vector<Tensor> means,
            std::vector<Tensor> square_means, std::vector<Tensor> rounded,
            std::vector<double> rules, std::optional<Tensor> scale,
            std::optional<Tensor> found_inf) {
  check_adamw(values, gradients, means, square_means, rounded, rules, scale, found_inf);
  if (values.empty() || (found_inf && scalar_of(*found_inf) != 0.0f)) {
    return;
  }
  const float factor = scale ? scalar_of(*scale) : 1.0f;
  std::vector<Shard> shards(values.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const bool rounds = rounded[i].numel() != 0;
    shards[i] = Shard{AdamW(&rules[i * kRuleNumbers], factor),
                      static_cast<float*>(values[i].mutable_data_ptr()),
                      static_cast<const float*>(gradients[i].const_data_ptr()),
                      static_cast<float*>(means[i].mutable_data_ptr()),
                      static_cast<float*>(square_means[i].mutable_data_ptr()),
                      rounds ? rounded[i].mutable_data_ptr() : nullptr,
                      rounds ? dtype_of(rounded[i], "adamw_: rounded") : Dtype::kFloat};
  }
  parallel_over(values, kGrain / 4, [&](std::size_t i, std::int64_t begin, std::int64_t end) {
    const Shard& shard = shards[i];
    with_type(shard.dtype, [&](auto* type) {
      update(shard.rule, shard.values, shard.gradient, shard.mean, shard.square_mean,
             static_cast<decltype(type)>(shard.rounded), begin, end);
    });
  });
}

}  // namespace poplar::cpu

// AdamW on a flat shard: state, values and low-precision copy are each read and written once.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../checks.h"
#include "kernels.h"
#include "parallel.h"
#include "poplar/adamw.h"

namespace poplar::cpu {
namespace {

// Elements that are updated before they are rounded, in a second loop from the L1 cache: GCC does
// not vectorize a single loop that rounds to fp16 (63 ms for 8 Mi elements, 8 ms with two loops).
constexpr std::int64_t kPiece = 256;

template <bool kRounds, typename Rounded>
POPLAR_CLONES void update(const AdamW& rule, float* __restrict values,
                          const float* __restrict gradient, float* __restrict mean,
                          float* __restrict square_mean, Rounded* __restrict rounded,
                          std::int64_t begin, std::int64_t end) {
  for (std::int64_t first = begin; first < end; first += kPiece) {
    const std::int64_t last = std::min(end, first + kPiece);
    for (std::int64_t i = first; i < last; ++i) {
      values[i] = rule.update(values[i], gradient[i], mean[i], square_mean[i]);
    }
    if constexpr (kRounds) {
      for (std::int64_t i = first; i < last; ++i) {
        rounded[i] = narrow<Rounded>(values[i]);
      }
    }
  }
}

}  // namespace

void adamw_(Tensor values, Tensor gradient, Tensor mean, Tensor square_mean,
            std::optional<Tensor> rounded, double lr, double beta1, double beta2, double eps,
            double weight_decay, double step, bool maximize, std::optional<Tensor> scale,
            std::optional<Tensor> found_inf) {
  check_adamw(values, gradient, mean, square_mean, rounded, step, scale, found_inf);
  if (found_inf && scalar_of(*found_inf) != 0.0f) {
    return;
  }
  const AdamW rule(lr, beta1, beta2, eps, weight_decay, step, maximize,
                   scale ? scalar_of(*scale) : 1.0f);
  const auto run = [&](auto rounds, auto* target) {
    parallel(values.numel(), kGrain / 4, [&](std::int64_t begin, std::int64_t end) {
      update<decltype(rounds)::value>(rule, static_cast<float*>(values.mutable_data_ptr()),
                                      static_cast<const float*>(gradient.const_data_ptr()),
                                      static_cast<float*>(mean.mutable_data_ptr()),
                                      static_cast<float*>(square_mean.mutable_data_ptr()), target,
                                      begin, end);
    });
  };
  if (!rounded) {
    return run(std::false_type{}, static_cast<float*>(nullptr));
  }
  with_type(dtype_of(*rounded, "adamw_: rounded"), [&](auto* type) {
    run(std::true_type{}, static_cast<decltype(type)>(rounded->mutable_data_ptr()));
  });
}

}  // namespace poplar::cpu

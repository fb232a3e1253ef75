// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) for one element, on
// host and device.
//
// Every operation is rounded to fp32 before the next one (contraction off), in the order of
// torch.optim.AdamW with one exception: the root is multiplied by the inverse of its correction.
// Constants are computed in double and rounded once.
#pragma once

#include <cmath>

#include "poplar/elementwise.h"

namespace poplar {

// One step's numbers for a tensor, in this order: lr, beta1, beta2, eps, weight_decay, step, and 1
// to maximize, 0 to minimize.
constexpr int kRuleNumbers = 7;

struct AdamW {
  float scale;
  float keep;         // 1 - lr * weight_decay
  bool keeps_mean;    // 1 - beta1 < 0.5: interpolate from the mean, otherwise from the gradient
  float mean_factor;  // 1 - beta1, or -beta1 when interpolating from the gradient
  float old_square;   // beta2
  float new_square;   // 1 - beta2
  float root_factor;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)

  AdamW() = default;

  AdamW(double lr, double beta1, double beta2, double eps, double weight_decay, double step,
        bool maximize, float scale)
      : scale(maximize ? -scale : scale),
        keep(static_cast<float>(1.0 - lr * weight_decay)),
        keeps_mean(1.0 - beta1 < 0.5),
        mean_factor(static_cast<float>(keeps_mean ? 1.0 - beta1 : -beta1)),
        old_square(static_cast<float>(beta2)),
        new_square(static_cast<float>(1.0 - beta2)),
        root_factor(static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, step)))),
        eps(static_cast<float>(eps)),
        step_size(static_cast<float>(lr / (1.0 - std::pow(beta1, step)))) {}

  AdamW(const double* numbers, float scale)
      : AdamW(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5],
              numbers[6] != 0.0, scale) {}

  // Returns the new value and updates `mean` and `square_mean`.
  POPLAR_HOST_DEVICE float update(float value, float gradient, float& mean,
                                  float& square_mean) const {
    const float scaled = gradient * scale;
    const float change = (scaled - mean) * mean_factor;
    mean = (keeps_mean ? mean : scaled) + change;
    const float decayed_square = square_mean * old_square;
    const float added = (scaled * scaled) * new_square;
    square_mean = decayed_square + added;
    const float root = std::sqrt(square_mean) * root_factor + eps;
    const float decayed = value * keep;
    const float moved = step_size * (mean / root);
    return decayed - moved;
  }
};

}  // namespace poplar

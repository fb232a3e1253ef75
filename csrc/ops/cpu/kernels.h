// The CPU operators that library.cpp registers. Schemas and contracts: poplar/ops.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace poplar::cpu {

using torch::stable::Tensor;

void copy_(Tensor target, Tensor source);

void pack_(Tensor bucket, std::vector<Tensor> grads, std::vector<std::int64_t> offsets,
           double weight, bool accumulate);

void rank_sum_(Tensor out, std::vector<Tensor> received, bool accumulate,
               std::optional<Tensor> sums);

void rank_sum_chunks_(Tensor out, std::vector<Tensor> received, Tensor work_counters,
                      std::optional<Tensor> sums);

void encode_(Tensor codes, std::vector<Tensor> values, std::vector<std::int64_t> offsets,
             double weight, std::int64_t bits, std::int64_t first, std::int64_t key);

void decode_sum_(Tensor out, std::vector<Tensor> received, std::int64_t bits, bool accumulate,
                 std::optional<Tensor> sums);

Tensor block_sums_of_squares(Tensor flat);

void exact_sum_(Tensor total, std::vector<Tensor> values);

Tensor exact_norm(Tensor totals);

Tensor clip_coefficient(Tensor norm, double max_norm, std::optional<Tensor> scale);

void adamw_(std::vector<Tensor> values, std::vector<Tensor> gradients, std::vector<Tensor> means,
            std::vector<Tensor> square_means, std::vector<Tensor> rounded,
            std::vector<double> rules, std::optional<Tensor> scale,
            std::optional<Tensor> found_inf);

}  // namespace poplar::cpu

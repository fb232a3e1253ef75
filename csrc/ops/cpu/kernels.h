// The CPU operators, as library.cpp registers them. Schemas and contracts: poplar/ops.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace poplar::cpu {

using torch::stable::Tensor;

void copy_(Tensor target, Tensor source);

void pack_(Tensor bucket, std::vector<Tensor> grads, std::vector<std::int64_t> offsets,
           double weight, bool accumulate);

void rank_sum_(Tensor out, std::vector<Tensor> received, bool accumulate);

void rank_sum_each_(std::vector<Tensor> outs, std::vector<Tensor> received);

void rank_sum_claimed_(std::vector<Tensor> outs, std::vector<Tensor> received, Tensor claims);

void unpack_(Tensor flat, std::vector<Tensor> outs, std::vector<std::int64_t> offsets);

Tensor block_sums_of_squares(Tensor flat);

}  // namespace poplar::cpu

// The memory that operators allocate for themselves, all of it by `new_empty` and `contiguous`.
//
// The text of torch's errors is lost in the stable ABI. These say that memory ran out, in words
// that poplar/system/out_of_memory.py recognizes.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

namespace poplar {

// An uninitialized tensor on the device of `like`. `name`: the operator.
inline torch::stable::Tensor new_empty(const char* name, const torch::stable::Tensor& like,
                                       torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                       torch::headeronly::ScalarType dtype) {
  try {
    return torch::stable::new_empty(like, sizes, dtype);
  } catch (const std::exception&) {
    std::int64_t numel = 1;
    for (const std::int64_t size : sizes) {
      numel *= size;
    }
    throw std::runtime_error(std::string("poplar::") + name + ": cannot allocate memory for " +
                             std::to_string(numel) + " elements");
  }
}

// A contiguous copy. The copy itself may fail for other reasons, which keep their error.
inline torch::stable::Tensor contiguous(const char* name, const torch::stable::Tensor& tensor) {
  torch::stable::Tensor copy = new_empty(name, tensor, tensor.sizes(), tensor.scalar_type());
  torch::stable::copy_(copy, tensor);
  return copy;
}

}  // namespace poplar

// One parallel loop over the elements of many tensors.
#pragma once

#include <vector>

#include "../checks.h"
#include "parallel.h"

namespace poplar::cpu {

// A thread's part of a list of tensors, seen as one sequence: forwards each piece of a tensor.
template <typename Function>
struct ListVisitor {
  const Function& function;

  void gap(std::int64_t, std::int64_t) const {}
  void piece(std::int64_t tensor, std::int64_t start, std::int64_t begin, std::int64_t end) const {
    function(static_cast<std::size_t>(tensor), start, start + (end - begin));
  }
};

// Calls function(i, begin, end) for ranges of the tensors' elements, on several threads if there
// are more than `grain`. Work is divided by the number of elements, whatever the tensors' sizes.
template <typename Function>
void parallel_over(const std::vector<Tensor>& tensors, std::int64_t grain,
                   const Function& function) {
  std::vector<std::int64_t> offsets, numels;
  std::int64_t total = 0;
  for (const Tensor& tensor : tensors) {
    offsets.push_back(total);
    numels.push_back(tensor.numel());
    total += tensor.numel();
  }
  parallel(total, grain, [&](std::int64_t begin, std::int64_t end) {
    walk(offsets.data(), numels.data(), static_cast<std::int64_t>(tensors.size()), begin, end,
         ListVisitor<Function>{function});
  });
}

}  // namespace poplar::cpu

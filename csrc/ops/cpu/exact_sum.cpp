// Contract: exact_sum_ in poplar/ops.
#include "poplar/exact_sum.h"

#include <atomic>

#include "../checks.h"
#include "kernels.h"
#include "lists.h"
#include "parallel.h"

namespace poplar::cpu {

void exact_sum_(Tensor total, std::vector<Tensor> values) {
  check_exact_sum(total, values);
  auto* words = static_cast<std::int64_t*>(total.mutable_data_ptr());
  parallel_over(values, kGrain, [&](std::size_t part, std::int64_t first, std::int64_t last) {
    const auto* data = static_cast<const float*>(values[part].const_data_ptr());
    std::int64_t own[kExactWords] = {};
    for (std::int64_t i = first; i < last; ++i) {
      const ExactTerm term = exact_term(data[i]);
      own[term.word] += term.low;
      own[term.word + 1] += term.high;
      own[kExactNotFinite] += !term.is_finite;
    }
    for (int word = 0; word < kExactWords; ++word) {  // in any order: integers
      std::atomic_ref<std::int64_t>(words[word]).fetch_add(own[word], std::memory_order_relaxed);
    }
  });
}

}  // namespace poplar::cpu

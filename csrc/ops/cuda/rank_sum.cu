#include "rank_sum.cuh"

#include <vector>

#include "binding.h"

namespace poplar::cuda {
namespace {

// Elements from each part to the next: transports receive into one tensor, rank after rank.
template <typename Received>
std::int64_t distance(const std::vector<Tensor>& parts) {
  const auto at = [&](std::size_t rank) {
    return static_cast<const Received*>(parts[rank].const_data_ptr());
  };
  const std::int64_t first = parts.size() > 1 ? at(1) - at(0) : 0;
  for (std::size_t rank = 1; rank < parts.size(); ++rank) {
    check(at(rank) - at(rank - 1) == first,
          "rank_sum_: on CUDA all parts must be slices of one tensor at equal distances");
  }
  return first;
}

void rank_sum_(Tensor out, std::vector<Tensor> received, bool accumulate,
               std::optional<Tensor> sums) {
  const std::int64_t numel = check_rank_sum(out, received);
  float* blocks = sums_of("rank_sum_", out, sums);
  if (numel == 0) {
    return;
  }
  const OnDevice device(out);
  with_type(dtype_of(received[0], "rank_sum_: received"), [&](auto* type) {
    using Received = std::remove_pointer_t<decltype(type)>;
    STD_CUDA_CHECK(rank_sum(static_cast<float*>(out.mutable_data_ptr()), blocks,
                            static_cast<const Received*>(received[0].const_data_ptr()),
                            distance<Received>(received), received.size(), numel, accumulate,
                            device.stream()));
  });
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("rank_sum_", TORCH_BOX(&poplar::cuda::rank_sum_));
}

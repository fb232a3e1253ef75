#include "rank_sum.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

void rank_sum_(Tensor out, Tensor received, std::int64_t ranks, bool accumulate) {
  const std::int64_t numel = check_rank_sum(out, received, ranks);
  const OnDevice device(out);
  with_type(dtype_of(received, "rank_sum_: received"), [&](auto* type) {
    using Received = std::remove_pointer_t<decltype(type)>;
    STD_CUDA_CHECK(rank_sum(static_cast<float*>(out.mutable_data_ptr()),
                            static_cast<const Received*>(received.const_data_ptr()), ranks, numel,
                            accumulate, device.stream()));
  });
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("rank_sum_", TORCH_BOX(&poplar::cuda::rank_sum_));
}

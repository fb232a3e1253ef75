#include "rank_sum.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

void rank_sum_(Tensor out, std::vector<Tensor> received, bool accumulate,
               std::optional<Tensor> sums) {
  check_rank_sum("rank_sum_", out, received);
  const std::int64_t numel = out.numel();
  float* blocks = sums_of("rank_sum_", out, sums);
  if (numel == 0) {
    return;
  }
  const OnDevice device(out);
  std::optional<Tensor> begun;
  if (received.size() > kParts) {
    begun = new_empty("rank_sum_", out, {numel}, out.scalar_type());
  }
  with_type(dtype_of(received[0], "rank_sum_: received"), [&](auto* type) {
    using Received = std::remove_pointer_t<decltype(type)>;
    std::vector<const Received*> parts;
    for (const Tensor& part : received) {
      parts.push_back(static_cast<const Received*>(part.const_data_ptr()));
    }
    STD_CUDA_CHECK(rank_sum(static_cast<float*>(out.mutable_data_ptr()), blocks, parts,
                            begun ? static_cast<float*>(begun->mutable_data_ptr()) : nullptr, numel,
                            accumulate, device.stream()));
  });
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("rank_sum_", POPLAR_OPERATOR(&poplar::cuda::rank_sum_));
}

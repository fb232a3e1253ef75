#include "pack.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

void pack_(Tensor bucket, std::vector<Tensor> grads, std::vector<std::int64_t> offsets,
           double weight, bool accumulate) {
  check_flat(bucket, "pack_: bucket");
  const std::int64_t numel = bucket.numel();
  const std::vector<std::int64_t> numels = numels_of("pack_", numel, grads, offsets);
  const OnDevice device(bucket);
  const Sources sources = sources_of("pack_", bucket, grads, offsets);
  with_type(dtype_of(bucket, "pack_: bucket"), [&](auto* type) {
    using Bucket = std::remove_pointer_t<decltype(type)>;
    STD_CUDA_CHECK(pack(static_cast<Bucket*>(bucket.mutable_data_ptr()), numel, offsets, numels,
                        sources.data, sources.dtypes, static_cast<float>(weight), accumulate,
                        device.stream()));
  });
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("pack_", POPLAR_OPERATOR(&poplar::cuda::pack_));
}

#include "unpack.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

void unpack_(Tensor flat, std::vector<Tensor> outs, std::vector<std::int64_t> offsets) {
  check_flat(flat, "unpack_: flat");
  const std::int64_t numel = flat.numel();
  const std::vector<std::int64_t> numels = numels_of("unpack_", numel, outs, offsets);
  const OnDevice device(flat);
  const Targets targets = targets_of("unpack_", flat, outs);
  with_type(dtype_of(flat, "unpack_: flat"), [&](auto* type) {
    using Flat = std::remove_pointer_t<decltype(type)>;
    STD_CUDA_CHECK(unpack(static_cast<const Flat*>(flat.const_data_ptr()), numel, offsets, numels,
                          targets.data, targets.dtypes, device.stream()));
  });
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("unpack_", POPLAR_OPERATOR(&poplar::cuda::unpack_));
}

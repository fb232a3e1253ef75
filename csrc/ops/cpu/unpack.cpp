// Copies one flat buffer into many tensors, each in its own dtype.
#include "../checks.h"
#include "kernels.h"
#include "parallel.h"

namespace poplar::cpu {
namespace {

template <typename Out, typename Flat>
POPLAR_CLONES void convert_run(Out* out, const Flat* flat, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = narrow<Out>(widen(flat[i]));
  }
}

template <typename Flat>
struct UnpackVisitor {
  const Flat* flat;
  const Targets& targets;

  void gap(std::int64_t, std::int64_t) const {}

  void piece(std::int64_t segment, std::int64_t start, std::int64_t begin, std::int64_t end) const {
    with_type(targets.dtypes[segment], [&](auto* type) {
      using Out = std::remove_pointer_t<decltype(type)>;
      convert_run(static_cast<Out*>(targets.data[segment]) + start, flat + begin, end - begin);
    });
  }
};

}  // namespace

void unpack_(Tensor flat, std::vector<Tensor> outs, std::vector<std::int64_t> offsets) {
  check_flat(flat, "unpack_: flat");
  const std::int64_t numel = flat.numel();
  const std::vector<std::int64_t> numels = numels_of("unpack_", numel, outs, offsets);
  const Targets targets = targets_of("unpack_", flat, outs);
  with_type(dtype_of(flat, "unpack_: flat"), [&](auto* type) {
    using Flat = std::remove_pointer_t<decltype(type)>;
    const UnpackVisitor<Flat> visitor{static_cast<const Flat*>(flat.const_data_ptr()), targets};
    parallel(numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
      walk(offsets.data(), numels.data(), static_cast<std::int64_t>(numels.size()), begin, end,
           visitor);
    });
  });
}

}  // namespace poplar::cpu

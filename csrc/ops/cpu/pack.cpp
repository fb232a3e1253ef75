// Many gradients -> one bucket, times a weight: every byte is read and written once.
#include <algorithm>
#include <cstring>

#include "../checks.h"
#include "kernels.h"
#include "parallel.h"

namespace poplar::cpu {
namespace {

template <typename Bucket, typename Gradient>
POPLAR_CLONES void write_run(Bucket* bucket, const Gradient* gradient, std::int64_t count,
                             float weight) {
  for (std::int64_t i = 0; i < count; ++i) {
    bucket[i] = weighted<Bucket>(weight, gradient[i]);
  }
}

template <typename Bucket, typename Gradient>
POPLAR_CLONES void add_run(Bucket* bucket, const Gradient* gradient, std::int64_t count,
                           float weight) {
  for (std::int64_t i = 0; i < count; ++i) {
    bucket[i] = add_weighted(bucket[i], weight, gradient[i]);
  }
}

template <typename Bucket>
struct PackVisitor {
  Bucket* bucket;
  const Sources& sources;
  float weight;
  bool accumulate;

  void gap(std::int64_t begin, std::int64_t end) const {
    if (!accumulate) {
      std::memset(static_cast<void*>(bucket + begin), 0,
                  static_cast<std::size_t>(end - begin) * sizeof(Bucket));
    }
  }

  void piece(std::int64_t segment, std::int64_t start, std::int64_t begin, std::int64_t end) const {
    with_type(sources.dtypes[segment], [&](auto* type) {
      using Gradient = std::remove_pointer_t<decltype(type)>;
      const Gradient* gradient = static_cast<const Gradient*>(sources.data[segment]) + start;
      (accumulate ? add_run<Bucket, Gradient>
                  : write_run<Bucket, Gradient>)(bucket + begin, gradient, end - begin, weight);
    });
  }
};

}  // namespace

void pack_(Tensor bucket, std::vector<Tensor> grads, std::vector<std::int64_t> offsets,
           double weight, bool accumulate) {
  check_flat(bucket, "pack_: bucket");
  const std::int64_t numel = bucket.numel();
  const std::vector<std::int64_t> numels = numels_of("pack_", numel, grads, offsets);
  const Sources sources = sources_of("pack_", bucket, grads);
  with_type(dtype_of(bucket, "pack_: bucket"), [&](auto* type) {
    using Bucket = std::remove_pointer_t<decltype(type)>;
    const PackVisitor<Bucket> visitor{static_cast<Bucket*>(bucket.mutable_data_ptr()), sources,
                                      static_cast<float>(weight), accumulate};
    parallel(numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
      walk(offsets.data(), numels.data(), static_cast<std::int64_t>(numels.size()), begin, end,
           visitor);
    });
  });
}

}  // namespace poplar::cpu

// What every rank sent, summed in rank order: the local half of a reduce-scatter.
#include <algorithm>

#include "../checks.h"
#include "kernels.h"
#include "parallel.h"

namespace poplar::cpu {
namespace {

// Elements summed at a time: the running totals of all ranks stay in the first-level cache.
constexpr std::int64_t kTile = 1024;

template <typename Received>
POPLAR_CLONES void sum_tile(float* total, const Received* received, std::int64_t stride,
                            std::int64_t ranks, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    total[i] = widen(received[i]);
  }
  for (std::int64_t rank = 1; rank < ranks; ++rank) {
    const Received* part = received + rank * stride;
    for (std::int64_t i = 0; i < count; ++i) {
      total[i] += widen(part[i]);
    }
  }
}

POPLAR_CLONES void add_tile(float* out, const float* total, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] += total[i];
  }
}

}  // namespace

void rank_sum_(Tensor out, Tensor received, std::int64_t ranks, bool accumulate) {
  const std::int64_t numel = check_rank_sum(out, received, ranks);
  float* target = static_cast<float*>(out.mutable_data_ptr());
  with_type(dtype_of(received, "rank_sum_: received"), [&](auto* type) {
    using Received = std::remove_pointer_t<decltype(type)>;
    const Received* source = static_cast<const Received*>(received.const_data_ptr());
    const std::int64_t grain = std::max(kTile, kGrain / ranks);
    parallel(numel, grain, [&](std::int64_t begin, std::int64_t end) {
      float total[kTile];
      for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = std::min(kTile, end - tile);
        float* into = accumulate ? total : target + tile;
        sum_tile(into, source + tile, numel, ranks, count);
        if (accumulate) {
          add_tile(target + tile, total, count);
        }
      }
    });
  });
}

}  // namespace poplar::cpu

// What every rank sent, summed in rank order: the local half of a reduce-scatter.
#include <algorithm>
#include <vector>

#include "../checks.h"
#include "kernels.h"
#include "parallel.h"

namespace poplar::cpu {
namespace {

// Elements summed at a time: the running totals of all ranks stay in the first-level cache.
constexpr std::int64_t kTile = 1024;

template <typename Received>
POPLAR_CLONES void widen_tile(float* total, const Received* part, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    total[i] = widen(part[i]);
  }
}

template <typename Received>
POPLAR_CLONES void add_tile(float* total, const Received* part, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    total[i] += widen(part[i]);
  }
}

}  // namespace

void rank_sum_(Tensor out, std::vector<Tensor> received, bool accumulate) {
  const std::int64_t numel = check_rank_sum(out, received);
  float* target = static_cast<float*>(out.mutable_data_ptr());
  with_type(dtype_of(received[0], "rank_sum_: received"), [&](auto* type) {
    using Received = std::remove_pointer_t<decltype(type)>;
    std::vector<const Received*> parts;
    for (const Tensor& part : received) {
      parts.push_back(static_cast<const Received*>(part.const_data_ptr()));
    }
    const std::int64_t grain = std::max(kTile, kGrain / static_cast<std::int64_t>(received.size()));
    parallel(numel, grain, [&](std::int64_t begin, std::int64_t end) {
      // Apart from `out`, which may be one of the parts.
      float total[kTile];
      for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = std::min(kTile, end - tile);
        widen_tile(total, parts[0] + tile, count);
        for (std::size_t rank = 1; rank < parts.size(); ++rank) {
          add_tile(total, parts[rank] + tile, count);
        }
        if (accumulate) {
          add_tile(target + tile, total, count);
        } else {
          std::copy_n(total, count, target + tile);
        }
      }
    });
  });
}

}  // namespace poplar::cpu

// Packs many gradients into one bucket, times a weight; every byte is read and written once.
#include <algorithm>
#include <cstring>

#include "../checks.h"
#include "block_sums.h"
#include "kernels.h"
#include "parallel.h"
#include "stream.h"
#include "widen.h"

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

template <typename Bucket, typename Gradient>
inline __attribute__((always_inline)) void pack_block(Bucket* packed, const Gradient* gradient,
                                                      float weight) {
  for (std::int64_t i = 0; i < kBlock; ++i) {
    packed[i] = weighted<Bucket>(weight, gradient[i]);
  }
}

// Whole blocks, with streaming stores: a block is computed in registers and stored before the next
// one is read, so that reads and stores overlap (8 KiB at a time took twice as long).
template <typename Bucket, typename Gradient>
POPLAR_CLONES void stream_blocks(Bucket* bucket, const Gradient* gradient, std::int64_t blocks,
                                 float weight) {
  for (std::int64_t block = 0; block < blocks; ++block) {
    alignas(kLine) Bucket packed[kBlock];
    pack_block(packed, gradient + block * kBlock, weight);
    stream(bucket + block * kBlock, packed, sizeof packed);
  }
}

#ifdef POPLAR_WIDE
// With 64-byte registers, which halve the time of arithmetic and stores; 16-bit gradients need more
// of both per byte than fp32. On two cores of an EPYC this reaches at least 96 % of a loop that
// only widens and stores, which in turn reaches 81 % of a copy (limited by writes). Without it, 93
// %, and fp16 10 % less than that.
template <typename Bucket, typename Gradient>
POPLAR_WIDE void stream_wide_blocks(Bucket* bucket, const Gradient* gradient, std::int64_t blocks,
                                    float weight) {
  for (std::int64_t block = 0; block < blocks; ++block) {
    alignas(kLine) Bucket packed[kBlock];
    if constexpr (std::is_same_v<Gradient, Half>) {
      alignas(kLine) float wide[kBlock];
      widen_block(wide, gradient + block * kBlock);
      pack_block(packed, wide, weight);
    } else {
      pack_block(packed, gradient + block * kBlock, weight);
    }
    stream_lines(bucket + block * kBlock, packed, sizeof packed);
  }
}
#endif

// The streaming loop for this bucket on this machine.
template <typename Bucket, typename Gradient>
auto select_stream_loop(const Bucket* bucket) {
#ifdef POPLAR_WIDE
  if (has_wide_registers() && reinterpret_cast<std::uintptr_t>(bucket) % kLine == 0) {
    return stream_wide_blocks<Bucket, Gradient>;
  }
#else
  (void)bucket;
#endif
  return stream_blocks<Bucket, Gradient>;
}

// The arguments of one call.
template <typename Bucket>
struct PackCall {
  Bucket* bucket;
  const Sources& sources;
  const std::vector<std::int64_t>& offsets;
  const std::vector<std::int64_t>& numels;
  float weight;
  bool accumulate;
  bool streams;

  // Calls function(typed pointer) for elements of a segment from `start` on.
  template <typename Function>
  void with_gradient(std::int64_t segment, std::int64_t start, const Function& function) const {
    with_type(sources.dtypes[segment], [&](auto* type) {
      using Gradient = std::remove_pointer_t<decltype(type)>;
      function(static_cast<const Gradient*>(sources.data[segment]) + start);
    });
  }

  void zero(std::int64_t begin, std::int64_t end) const {
    std::memset(static_cast<void*>(bucket + begin), 0,
                static_cast<std::size_t>(end - begin) * sizeof(Bucket));
  }

  void range(std::int64_t begin, std::int64_t end) const;
};

// Writes or adds through the caches.
template <typename Bucket>
struct CachedWriter {
  const PackCall<Bucket>& call;

  void gap(std::int64_t begin, std::int64_t end) const {
    if (!call.accumulate) {
      call.zero(begin, end);
    }
  }

  void piece(std::int64_t segment, std::int64_t start, std::int64_t begin, std::int64_t end) const {
    call.with_gradient(segment, start, [&](const auto* gradient) {
      using Gradient = std::remove_cv_t<std::remove_pointer_t<decltype(gradient)>>;
      (call.accumulate
           ? add_run<Bucket, Gradient>
           : write_run<Bucket, Gradient>)(call.bucket + begin, gradient, end - begin, call.weight);
    });
  }
};

// Streams the blocks that are within one piece, and writes the others through the caches.
template <typename Bucket>
struct StreamingWriter {
  const PackCall<Bucket>& call;

  void gap(std::int64_t begin, std::int64_t end) const { call.zero(begin, end); }

  void piece(std::int64_t segment, std::int64_t start, std::int64_t begin, std::int64_t end) const {
    const std::int64_t low = std::min(end, (begin + kBlock - 1) / kBlock * kBlock);
    const std::int64_t high = std::max(low, end / kBlock * kBlock);
    call.with_gradient(segment, start, [&](const auto* gradient) {
      Bucket* bucket = call.bucket;
      if (begin < low) {
        write_run(bucket + begin, gradient, low - begin, call.weight);
      }
      using Gradient = std::remove_cv_t<std::remove_pointer_t<decltype(gradient)>>;
      select_stream_loop<Bucket, Gradient>(bucket)(bucket + low, gradient + (low - begin),
                                                   (high - low) / kBlock, call.weight);
      if (high < end) {
        write_run(bucket + high, gradient + (high - begin), end - high, call.weight);
      }
    });
  }
};

template <typename Bucket>
void PackCall<Bucket>::range(std::int64_t begin, std::int64_t end) const {
  const auto count = static_cast<std::int64_t>(numels.size());
  if (streams) {
    walk(offsets.data(), numels.data(), count, begin, end, StreamingWriter<Bucket>{*this});
  } else {
    walk(offsets.data(), numels.data(), count, begin, end, CachedWriter<Bucket>{*this});
  }
}

}  // namespace

void pack_(Tensor bucket, std::vector<Tensor> grads, std::vector<std::int64_t> offsets,
           double weight, bool accumulate) {
  check_flat(bucket, "pack_: bucket");
  const std::int64_t numel = bucket.numel();
  const std::vector<std::int64_t> numels = numels_of("pack_", numel, grads, offsets);
  const Sources sources = sources_of("pack_", bucket, grads, offsets);
  with_type(dtype_of(bucket, "pack_: bucket"), [&](auto* type) {
    using Bucket = std::remove_pointer_t<decltype(type)>;
    Bucket* data = static_cast<Bucket*>(bucket.mutable_data_ptr());
    const bool streams =
        !accumulate && can_stream(data, numel * static_cast<std::int64_t>(sizeof(Bucket)));
    const PackCall<Bucket> call{data,       sources, offsets, numels, static_cast<float>(weight),
                                accumulate, streams};
    parallel((numel + kBlock - 1) / kBlock, kGrain / kBlock,
             [&](std::int64_t first, std::int64_t last) {
               call.range(first * kBlock, std::min(last * kBlock, numel));
               end_streaming();
             });
  });
}

}  // namespace poplar::cpu

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

// Elements packed at a time, so that the following step finds them in the L1 cache.
constexpr std::int64_t kChunk = 4096;
static_assert(kChunk / kBlock <= 64, "a chunk's blocks are the bits of a word");

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
POPLAR_CLONES void sum_chunk(float* sums, const Bucket* chunk, std::int64_t count) {
  block_sums(sums, chunk, count);
}

template <typename Bucket, typename Gradient>
inline __attribute__((always_inline)) void make_block(Bucket* made, const Gradient* gradient,
                                                      float weight) {
  for (std::int64_t i = 0; i < kBlock; ++i) {
    made[i] = weighted<Bucket>(weight, gradient[i]);
  }
}

// Whole blocks, with streaming stores: a block is computed in registers, summed and stored before
// the next one is read, so that reads and stores overlap (8 KiB at a time took twice as long).
template <bool kSums, typename Bucket, typename Gradient>
POPLAR_CLONES void stream_blocks(Bucket* bucket, const Gradient* gradient, std::int64_t blocks,
                                 float weight, float* sums) {
  for (std::int64_t block = 0; block < blocks; ++block) {
    alignas(kLine) Bucket made[kBlock];
    make_block(made, gradient + block * kBlock, weight);
    if constexpr (kSums) {
      sums[block] = block_sum(static_cast<const Bucket*>(made));
    }
    stream(bucket + block * kBlock, made, sizeof made);
  }
}

#ifdef POPLAR_WIDE
// With 64-byte registers, which halve the time of arithmetic and stores; 16-bit gradients need more
// of both per byte than fp32. On two cores of an EPYC this reaches at least 96 % of a loop that
// only widens and stores, which in turn reaches 81 % of a copy (limited by writes). Without it, 93
// %, and fp16 10 % less than that.
template <bool kSums, typename Bucket, typename Gradient>
POPLAR_WIDE void stream_wide_blocks(Bucket* bucket, const Gradient* gradient, std::int64_t blocks,
                                    float weight, float* sums) {
  for (std::int64_t block = 0; block < blocks; ++block) {
    alignas(kLine) Bucket made[kBlock];
    if constexpr (std::is_same_v<Gradient, Half>) {
      alignas(kLine) float wide[kBlock];
      widen_block(wide, gradient + block * kBlock);
      make_block(made, wide, weight);
    } else {
      make_block(made, gradient + block * kBlock, weight);
    }
    if constexpr (kSums) {
      sums[block] = block_sum(static_cast<const Bucket*>(made));
    }
    stream_lines(bucket + block * kBlock, made, sizeof made);
  }
}
#endif

// The streaming loop for this bucket on this machine.
template <bool kSums, typename Bucket, typename Gradient>
auto streaming_to(const Bucket* bucket) {
#ifdef POPLAR_WIDE
  if (has_wide_registers() && reinterpret_cast<std::uintptr_t>(bucket) % kLine == 0) {
    return stream_wide_blocks<kSums, Bucket, Gradient>;
  }
#else
  (void)bucket;
#endif
  return stream_blocks<kSums, Bucket, Gradient>;
}

// The arguments of one call.
template <typename Bucket>
struct Packing {
  Bucket* bucket;
  const Sources& sources;
  const std::vector<std::int64_t>& offsets;
  const std::vector<std::int64_t>& numels;
  float weight;
  bool accumulate;
  bool streams;
  float* sums;  // may be null

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

  void chunk(std::int64_t begin, std::int64_t end) const;
};

// Writes or adds through the caches, which then hold the chunk for its sums.
template <typename Bucket>
struct Through {
  const Packing<Bucket>& packing;

  void gap(std::int64_t begin, std::int64_t end) const {
    if (!packing.accumulate) {
      packing.zero(begin, end);
    }
  }

  void piece(std::int64_t segment, std::int64_t start, std::int64_t begin, std::int64_t end) const {
    packing.with_gradient(segment, start, [&](const auto* gradient) {
      using Gradient = std::remove_cv_t<std::remove_pointer_t<decltype(gradient)>>;
      (packing.accumulate ? add_run<Bucket, Gradient>
                          : write_run<Bucket, Gradient>)(packing.bucket + begin, gradient,
                                                         end - begin, packing.weight);
    });
  }
};

// Streams the blocks that are within one piece. The others are written through the caches and
// summed when the chunk is complete.
template <typename Bucket>
struct Past {
  const Packing<Bucket>& packing;
  std::int64_t first;     // of the chunk
  std::uint64_t& shared;  // one bit for each block of the chunk that spans several pieces or gaps

  void share(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = (begin - first) / kBlock; i * kBlock < end - first; ++i) {
      shared |= std::uint64_t{1} << i;
    }
  }

  void gap(std::int64_t begin, std::int64_t end) const {
    packing.zero(begin, end);
    share(begin, end);
  }

  void piece(std::int64_t segment, std::int64_t start, std::int64_t begin, std::int64_t end) const {
    const std::int64_t low = std::min(end, (begin + kBlock - 1) / kBlock * kBlock);
    const std::int64_t high = std::max(low, end / kBlock * kBlock);
    packing.with_gradient(segment, start, [&](const auto* gradient) {
      Bucket* bucket = packing.bucket;
      if (begin < low) {
        write_run(bucket + begin, gradient, low - begin, packing.weight);
        share(begin, low);
      }
      using Gradient = std::remove_cv_t<std::remove_pointer_t<decltype(gradient)>>;
      const bool wanted = packing.sums != nullptr;
      (wanted ? streaming_to<true, Bucket, Gradient>(bucket)
              : streaming_to<false, Bucket, Gradient>(bucket))(
          bucket + low, gradient + (low - begin), (high - low) / kBlock, packing.weight,
          wanted ? packing.sums + low / kBlock : nullptr);
      if (high < end) {
        write_run(bucket + high, gradient + (high - begin), end - high, packing.weight);
        share(high, end);
      }
    });
  }
};

template <typename Bucket>
void Packing<Bucket>::chunk(std::int64_t begin, std::int64_t end) const {
  const auto count = static_cast<std::int64_t>(numels.size());
  if (!streams) {
    walk(offsets.data(), numels.data(), count, begin, end, Through<Bucket>{*this});
    if (sums != nullptr) {
      sum_chunk(sums + begin / kBlock, bucket + begin, end - begin);
    }
    return;
  }
  std::uint64_t shared = 0;
  walk(offsets.data(), numels.data(), count, begin, end, Past<Bucket>{*this, begin, shared});
  if (sums == nullptr) {
    return;
  }
  for (std::int64_t block = begin; shared != 0; block += kBlock, shared >>= 1) {
    if (shared & 1) {
      sum_chunk(sums + block / kBlock, bucket + block, std::min(kBlock, end - block));
    }
  }
}

}  // namespace

void pack_(Tensor bucket, std::vector<Tensor> grads, std::vector<std::int64_t> offsets,
           double weight, bool accumulate, std::optional<Tensor> sums) {
  check_flat(bucket, "pack_: bucket");
  const std::int64_t numel = bucket.numel();
  const std::vector<std::int64_t> numels = numels_of("pack_", numel, grads, offsets);
  const Sources sources = sources_of("pack_", bucket, grads, offsets);
  float* blocks = sums_of("pack_", bucket, sums);
  with_type(dtype_of(bucket, "pack_: bucket"), [&](auto* type) {
    using Bucket = std::remove_pointer_t<decltype(type)>;
    Bucket* data = static_cast<Bucket*>(bucket.mutable_data_ptr());
    const bool streams =
        !accumulate && can_stream(data, numel * static_cast<std::int64_t>(sizeof(Bucket)));
    const Packing<Bucket> packing{data,       sources, offsets, numels, static_cast<float>(weight),
                                  accumulate, streams, blocks};
    parallel((numel + kChunk - 1) / kChunk, kGrain / kChunk,
             [&](std::int64_t first, std::int64_t last) {
               for (std::int64_t chunk = first; chunk < last; ++chunk) {
                 packing.chunk(chunk * kChunk, std::min((chunk + 1) * kChunk, numel));
               }
               end_streaming();
             });
  });
}

}  // namespace poplar::cpu

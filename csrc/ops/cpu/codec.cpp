// Encodes flat tensors for slow links, and sums what ranks encoded. The format: poplar/codec.h.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../checks.h"
#include "block_sums.h"
#include "codec_groups.h"
#include "kernels.h"
#include "parallel.h"

namespace poplar::cpu {
namespace {

static_assert(kGroup == kBlock);

template <int kBits, typename Value>
POPLAR_CLONES void encode_groups(std::uint8_t* codes, const Value* values, std::int64_t groups,
                                 float weight, RandomKey key, std::int64_t number) {
  for (std::int64_t group = 0; group < groups; group += kBatch) {
    const auto count = static_cast<int>(std::min<std::int64_t>(kBatch, groups - group));
    encode_batch<kBits>(codes + group * Code<kBits>::kGroupBytes, values + group * kGroup, count,
                        weight, key, number + group);
  }
}

// The sum over ranks of groups, and where it goes: through the caches, because streaming stores
// took 1.3 times as long.
struct DecodeCall {
  std::vector<const std::uint8_t*> ranks;
  void* out;
  std::int64_t numel;
  bool accumulate;
  float* sums;  // block sums of squares of an fp32 result; may be null
};

// Rounds and stores the total of a group; `values` are overwritten.
template <typename Out>
inline __attribute__((always_inline)) void finish(const DecodeCall& call, float* values,
                                                  std::int64_t group, std::int64_t count) {
  Out* out = static_cast<Out*>(call.out) + group * kGroup;
  if (call.accumulate) {
    for (std::int64_t i = 0; i < count; ++i) {
      values[i] += widen(out[i]);
    }
  }
  if constexpr (std::is_same_v<Out, float>) {
    std::copy_n(values, count, out);
    if (call.sums != nullptr) {
      block_sums(call.sums + group, values, count);
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] = narrow<Out>(values[i]);
    }
  }
}

template <int kBits, typename Out>
POPLAR_CLONES void decode_groups(const DecodeCall& call, std::int64_t begin, std::int64_t end) {
  const int size = static_cast<int>(call.ranks.size());
  for (std::int64_t group = begin; group < end; ++group) {
    float values[kGroup];
    decode_group<kBits>(values, call.ranks.data(), size, group * Code<kBits>::kGroupBytes);
    // Whole groups separately: loops of a known length need no remainder code.
    if (const std::int64_t left = call.numel - group * kGroup; left >= kGroup) {
      finish<Out>(call, values, group, kGroup);
    } else {
      finish<Out>(call, values, group, left);
    }
  }
}

// Encodes the pieces of a range in order. Whole groups within one tensor are read from there; the
// parts of other groups are collected first.
template <int kBits>
struct Encoder {
  std::uint8_t* codes;
  const Sources& sources;
  float weight;
  RandomKey key;
  std::int64_t first_group;
  mutable float collected[kGroup] = {};

  void whole(const float* values, std::int64_t group) const {
    encode(values, group, 1, 1.0f);
    std::fill_n(collected, kGroup, 0.0f);
  }

  template <typename Value>
  void encode(const Value* values, std::int64_t group, std::int64_t groups, float factor) const {
    encode_groups<kBits>(codes + group * Code<kBits>::kGroupBytes, values, groups, factor, key,
                         first_group + group);
  }

  void gap(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t stop; begin < end; begin = stop) {
      stop = std::min(end, (begin / kGroup + 1) * kGroup);
      if (stop % kGroup == 0) {
        whole(collected, stop / kGroup - 1);
      }
    }
  }

  void piece(std::int64_t segment, std::int64_t start, std::int64_t begin, std::int64_t end) const {
    with_type(sources.dtypes[static_cast<std::size_t>(segment)], [&](auto* type) {
      using Value = std::remove_pointer_t<decltype(type)>;
      const auto* values = static_cast<const Value*>(sources.data[segment]) + start;
      for (std::int64_t stop; begin < end; values += stop - begin, begin = stop) {
        const std::int64_t groups = begin % kGroup == 0 ? (end - begin) / kGroup : 0;
        stop = groups > 0 ? begin + groups * kGroup : std::min(end, (begin / kGroup + 1) * kGroup);
        if (groups > 0) {
          encode(values, begin / kGroup, groups, weight);
        } else {
          collect(values, begin, stop);
        }
      }
    });
  }

  template <typename Value>
  void collect(const Value* values, std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) {
      collected[i % kGroup] = weight * widen(values[i - begin]);
    }
    if (end % kGroup == 0) {
      whole(collected, end / kGroup - 1);
    }
  }
};

}  // namespace

void encode_(Tensor codes, std::vector<Tensor> values, std::vector<std::int64_t> offsets,
             double weight, std::int64_t bits, std::int64_t first, std::int64_t key) {
  const std::int64_t groups = check_codes("encode_: codes", codes, bits);
  const auto numels = numels_of("encode_", groups * kGroup, values, offsets);
  const Sources sources = check_encode(codes, values, first);
  parallel(groups, kGrain / kGroup, [&](std::int64_t begin, std::int64_t end) {
    const auto encode = [&](auto encoder) {
      walk(offsets.data(), numels.data(), static_cast<std::int64_t>(numels.size()), begin * kGroup,
           end * kGroup, encoder);
    };
    auto* data = static_cast<std::uint8_t*>(codes.mutable_data_ptr());
    const auto factor = static_cast<float>(weight);
    if (bits == 8) {
      encode(Encoder<8>{data, sources, factor, RandomKey(key), first / kGroup});
    } else {
      encode(Encoder<4>{data, sources, factor, RandomKey(key), first / kGroup});
    }
  });
}

void decode_sum_(Tensor out, std::vector<Tensor> received, std::int64_t bits, bool accumulate,
                 std::optional<Tensor> sums) {
  check_decode_sum(out, received, bits, sums);
  DecodeCall call{
      {}, out.mutable_data_ptr(), out.numel(), accumulate, sums_of("decode_sum_", out, sums)};
  for (const Tensor& part : received) {
    call.ranks.push_back(static_cast<const std::uint8_t*>(part.const_data_ptr()));
  }
  with_type(dtype_of(out, "decode_sum_: out"), [&](auto* type) {
    using Out = std::remove_pointer_t<decltype(type)>;
    const auto decode = bits == 8 ? decode_groups<8, Out> : decode_groups<4, Out>;
    const std::int64_t grain = kGrain / kGroup / static_cast<std::int64_t>(received.size());
    parallel(blocks_of(call.numel), std::max<std::int64_t>(1, grain),
             [&](std::int64_t begin, std::int64_t end) { decode(call, begin, end); });
  });
}

}  // namespace poplar::cpu

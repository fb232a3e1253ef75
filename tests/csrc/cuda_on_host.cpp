// The CUDA kernels as C functions, for tests/unit/test_cuda_on_host.py: compiled for the host with
// emulated/cuda_runtime.h instead of CUDA's header.
#include <type_traits>

#include "adamw.cuh"
#include "clip.cuh"
#include "codec.cuh"
#include "exact_sum.cuh"
#include "norm.cuh"
#include "pack.cuh"
#include "rank_sum.cuh"

namespace {

using namespace poplar;

template <typename Element>
std::vector<Element> listed(const Element* elements, std::int64_t count) {
  return std::vector<Element>(elements, elements + count);
}

}  // namespace

extern "C" {

void pack(Dtype dtype, void* bucket, std::int64_t numel, std::int64_t count,
          const std::int64_t* offsets, const std::int64_t* numels, const void* const* data,
          const Dtype* dtypes, float weight, bool accumulate) {
  with_type(dtype, [&](auto* type) {
    cuda::pack(static_cast<decltype(type)>(bucket), numel, listed(offsets, count),
               listed(numels, count), listed(data, count), listed(dtypes, count), weight,
               accumulate, nullptr);
  });
}

void rank_sum(Dtype dtype, float* out, float* sums, const void* const* received, std::int64_t ranks,
              float* begun, std::int64_t numel, bool accumulate) {
  with_type(dtype, [&](auto* type) {
    using Received = std::remove_pointer_t<decltype(type)>;
    std::vector<const Received*> parts;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      parts.push_back(static_cast<const Received*>(received[rank]));
    }
    cuda::rank_sum(out, sums, parts, begun, numel, accumulate, nullptr);
  });
}

void encode(std::int64_t bits, std::uint8_t* codes, std::int64_t groups, std::int64_t count,
            const std::int64_t* offsets, const std::int64_t* numels, const void* const* data,
            const Dtype* dtypes, float weight, std::int64_t first, std::int64_t key) {
  const auto run = bits == 8 ? cuda::encode<8> : cuda::encode<4>;
  run(codes, groups, listed(offsets, count), listed(numels, count), listed(data, count),
      listed(dtypes, count), weight, first, RandomKey(key), nullptr);
}

void decode_sum(std::int64_t bits, Dtype dtype, void* out, float* sums,
                const std::uint8_t* const* received, std::int64_t ranks, std::int64_t numel,
                bool accumulate) {
  with_type(dtype, [&](auto* type) {
    using Out = std::remove_pointer_t<decltype(type)>;
    const auto run = bits == 8 ? cuda::decode_sum<8, Out> : cuda::decode_sum<4, Out>;
    run(static_cast<Out*>(out), sums, listed(received, ranks), numel, accumulate, nullptr);
  });
}

void block_sums(Dtype dtype, float* sums, const void* flat, std::int64_t numel) {
  with_type(dtype, [&](auto* type) {
    using Flat = std::remove_pointer_t<decltype(type)>;
    cuda::block_sums(sums, static_cast<const Flat*>(flat), numel, nullptr);
  });
}

void exact_sum(std::int64_t* total, std::int64_t count, const float* const* values,
               const std::int64_t* numels) {
  std::vector<cuda::Addends> parts;
  for (std::int64_t i = 0; i < count; ++i) {
    parts.push_back({values[i], numels[i]});
  }
  cuda::exact_sum(total, parts, nullptr);
}

void exact_norm(double* norm, const std::int64_t* totals, std::int64_t rows,
                std::int64_t distance) {
  cuda::norm(norm, totals, rows, distance, nullptr);
}

void clip_coefficient(double* coefficient, const double* norm, const double* scale,
                      float max_norm) {
  cuda::clip(coefficient, norm, scale, max_norm, nullptr);
}

// `addresses`: for each tensor those of values, gradient, mean, square_mean and rounded.
void adamw(std::int64_t count, void* const* addresses, const Dtype* dtypes,
           const std::int64_t* numels, const double* rules, const float* scale,
           const float* found_inf) {
  std::vector<cuda::Shard> shards;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = [&](int place) { return static_cast<float*>(addresses[5 * i + place]); };
    shards.push_back({at(0), at(1), at(2), at(3), at(4), numels[i],
                      AdamW(rules + i * kRuleNumbers, 1.0f), dtypes[i], false});
    shards.back().aligned = cuda::is_aligned(shards.back());
  }
  cuda::adamw(shards, scale, found_inf, nullptr);
}

}  // extern "C"

// Encodes flat tensors for slow links, and sums what ranks encoded. The format: poplar/codec.h.
//
// A thread has eight consecutive elements, eight threads have a group. A thread block gathers the
// codes of its tile in shared memory, because groups of 66 or 34 bytes are not aligned.
#pragma once

#include <algorithm>
#include <vector>

#include "block_sums.cuh"
#include "pack.cuh"
#include "poplar/codec.h"

namespace poplar::cuda {

constexpr int kOwn = 8;  // elements of a thread
static_assert(kGroup == kBlock && kTile % (kThreads * kOwn) == 0);

// Levels of the transform within a thread.
template <int kDistance>
__device__ void transform_own(float (&x)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if ((i & kDistance) == 0) {
      const float low = x[i];
      const float high = x[i + kDistance];
      x[i] = low + high;
      x[i + kDistance] = low - high;
    }
  }
}

// A level between threads; the one with the higher elements gets the differences.
template <int kDistance>
__device__ void transform_between(float (&x)[kOwn]) {
  constexpr int kThreadDistance = kDistance / kOwn;
  const bool is_high = (threadIdx.x & kThreadDistance) != 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float other = __shfl_xor_sync(0xffffffffu, x[i], kThreadDistance);
    x[i] = is_high ? other - x[i] : x[i] + other;
  }
}

// Stores the codes of a thread's elements, two or four at once, among those of the tile at `codes`.
// `place`: of its first element in the tile.
template <int kBits>
__device__ void encode_own(std::uint8_t* codes, float (&x)[kOwn], int place, RandomKey key,
                           std::int64_t first_group) {
  transform_between<32>(x);
  transform_between<16>(x);
  transform_between<8>(x);
  transform_own<4>(x);
  transform_own<2>(x);
  transform_own<1>(x);
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const std::uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffffu, largest, distance);
    largest = other > largest ? other : largest;
  }
  const std::uint32_t scale = scale_bits<kBits>(largest);
  const float units = units_of(scale);
  const int in_group = place % kGroup;
  const std::uint32_t counter = first_counter(key, first_group + place / kGroup) + in_group / 2;
  auto* group = reinterpret_cast<std::uint16_t*>(codes + place / kGroup * Code<kBits>::kGroupBytes);
  std::uint32_t own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const std::uint32_t word = random_word(key, counter + i / 2);
    const std::uint32_t random = i % 2 == 0 ? first_random(word) : second_random(word);
    own[i] = code_of<kBits>(scale == kNotFinite ? 0.0f : x[i], units, random);
  }
  constexpr int kCodes = 16 / kBits;  // in two bytes
#pragma unroll
  for (int i = 0; i < kOwn; i += kCodes) {
    std::uint32_t both = 0;
#pragma unroll
    for (int k = 0; k < kCodes; ++k) {
      both |= own[i + k] << k * kBits;
    }
    group[(in_group + i) / kCodes] = static_cast<std::uint16_t>(both);
  }
  if (in_group == 0) {
    group[Code<kBits>::kCodeBytes / 2] = static_cast<std::uint16_t>(scale);
  }
}

// Copies the codes of a tile to global memory, 16 bytes at once where it is aligned.
__device__ inline void store_codes(std::uint8_t* out, const std::uint8_t* codes, int bytes) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
  const int wide = aligned ? bytes / 16 : 0;
  for (int i = threadIdx.x; i < wide; i += kThreads) {
    reinterpret_cast<Vector<float, 4>*>(out)[i] =
        reinterpret_cast<const Vector<float, 4>*>(codes)[i];
  }
  for (int i = wide * 8 + threadIdx.x; i < bytes / 2; i += kThreads) {
    reinterpret_cast<std::uint16_t*>(out)[i] = reinterpret_cast<const std::uint16_t*>(codes)[i];
  }
}

// All threads of a block take part in each step, also those whose elements are past the tile.
template <int kBits, typename Value>
__device__ void encode_tile(std::uint8_t* out, const Value* values, float weight, const Tile& tile,
                            RandomKey key, std::int64_t first_group) {
  alignas(16) __shared__ std::uint8_t codes[kTile / kGroup * Code<kBits>::kGroupBytes];
  const bool aligned = is_aligned<kOwn>(values);
  for (int place = threadIdx.x * kOwn; place < kTile; place += kThreads * kOwn) {
    float own[kOwn];
    load(own, values + place, tile.end - tile.begin - place, aligned);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i] = weight * own[i];
    }
    encode_own<kBits>(codes, own, place, key, first_group + tile.begin / kGroup);
  }
  __syncthreads();
  const int groups = static_cast<int>((tile.end - tile.begin) / kGroup);
  store_codes(out + tile.begin / kGroup * Code<kBits>::kGroupBytes, codes,
              groups * Code<kBits>::kGroupBytes);
}

template <int kBits>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(std::uint8_t* out, const __grid_constant__ SegmentTable table, float weight,
                  RandomKey key, std::int64_t first_group) {
  const Tile tile = tile_of(table, blockIdx.x);
  std::int64_t segment = -1;
  std::int64_t start = 0;
  walk_tile(table, tile, WholeTile{&segment, &start, tile});
  const auto run = [&](const auto* values, float factor) {
    encode_tile<kBits>(out, values, factor, tile, key, first_group);
  };
  if (segment < 0) {
    __shared__ float staged[kTile];
    walk_tile(table, tile, MixedTile<float, false>{nullptr, table, weight, tile.begin, staged});
    __syncthreads();
    return run(staged, 1.0f);
  }
  with_type(table.dtypes[segment], [&](auto* type) {
    run(static_cast<const std::remove_pointer_t<decltype(type)>*>(table.data[segment]) + start,
        weight);
  });
}

template <int kBits>
cudaError_t encode(std::uint8_t* codes, std::int64_t groups,
                   const std::vector<std::int64_t>& offsets,
                   const std::vector<std::int64_t>& numels, const std::vector<const void*>& data,
                   const std::vector<Dtype>& dtypes, float weight, std::int64_t first,
                   RandomKey key, cudaStream_t stream) {
  return for_each_table(groups * kGroup, offsets, numels, data, dtypes,
                        [&](const SegmentTable& table) {
                          return launch(encode_kernel<kBits>, table.end - table.begin, kTile,
                                        stream, codes, table, weight, key, first / kGroup);
                        });
}

struct CodeTable {
  const std::uint8_t* data[kMostRanks];
  int count;
};

// Adds the coefficients of a thread's elements, which are at `in_group` of the group at `codes`.
template <int kBits>
__device__ void add_own(float (&total)[kOwn], const std::uint8_t* codes, int in_group) {
  const auto* group = reinterpret_cast<const std::uint16_t*>(codes);
  const float share = scale_of(group[Code<kBits>::kCodeBytes / 2]) * 0x1p-6f;
  constexpr int kCodes = 16 / kBits;
#pragma unroll
  for (int i = 0; i < kOwn; i += kCodes) {
    const std::uint32_t both = group[(in_group + i) / kCodes];
#pragma unroll
    for (int k = 0; k < kCodes; ++k) {
      total[i + k] += coefficient_of<kBits>(both >> k * kBits & Code<kBits>::kMask, share);
    }
  }
}

template <int kBits, typename Out, bool kAccumulate>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(Out* out, float* sums, const __grid_constant__ CodeTable table,
                  std::int64_t numel, bool aligned) {
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kOwn;
  const std::int64_t count = numel - first;
  const std::int64_t group = first / kGroup;
  float total[kOwn] = {};
  if (group * kGroup < numel) {
#pragma unroll 4
    for (int rank = 0; rank < table.count; ++rank) {
      add_own<kBits>(total, table.data[rank] + group * Code<kBits>::kGroupBytes,
                     static_cast<int>(first % kGroup));
    }
  }
  transform_own<1>(total);
  transform_own<2>(total);
  transform_own<4>(total);
  transform_between<8>(total);
  transform_between<16>(total);
  transform_between<32>(total);
  if constexpr (kAccumulate) {
    float old[kOwn];
    load(old, out + first, count, aligned);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      total[i] = old[i] + total[i];
    }
  }
  store(out + first, total, count, aligned);
  if (sums != nullptr) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      total[i] = i < count ? total[i] : 0.0f;  // a partial group's codes have more elements
    }
    store_block_sums(sums, total, first, numel);
  }
}

// `sums` may be null.
template <int kBits, typename Out>
cudaError_t decode_sum(Out* out, float* sums, const std::vector<const std::uint8_t*>& parts,
                       std::int64_t numel, bool accumulate, cudaStream_t stream) {
  CodeTable table;
  table.count = static_cast<int>(parts.size());
  std::copy(parts.begin(), parts.end(), table.data);
  const auto kernel =
      accumulate ? decode_kernel<kBits, Out, true> : decode_kernel<kBits, Out, false>;
  return launch(kernel, numel, kThreads * kOwn, stream, out, sums, table, numel,
                is_aligned<kOwn>(out));
}

}  // namespace poplar::cuda

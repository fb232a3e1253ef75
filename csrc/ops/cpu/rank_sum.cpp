// Sums the ranks' parts in rank order: the local half of a reduce-scatter or an all-reduce.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../checks.h"
#include "block_sums.h"
#include "kernels.h"
#include "parallel.h"
#include "poplar/work_sharing.h"
#include "stream.h"
#include "widen.h"

namespace poplar::cpu {
namespace {

// One block is summed at a time, so that its total stays in registers and all parts are read in
// parallel. Tiles of 1024 elements took 1.1 to 1.5 times as long with four parts of 64 MiB.

// For one block, total = ((total + part 0) + part 1) + ...; kFirst: the total starts with part 0.
// Up to four parts are added at once.
template <bool kFirst, int kParts, typename Received>
inline __attribute__((always_inline)) void add_parts(float* total, const Received* const* parts,
                                                     std::int64_t begin, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    float sum = kFirst ? widen(parts[0][begin + i]) : total[i] + widen(parts[0][begin + i]);
    for (int part = 1; part < kParts; ++part) {
      sum += widen(parts[part][begin + i]);
    }
    total[i] = sum;
  }
}

template <bool kFirst, typename Received>
inline __attribute__((always_inline)) void add_up_to_four(float* total,
                                                          const Received* const* parts, int size,
                                                          std::int64_t begin, std::int64_t count) {
  switch (size) {
    case 1:
      return add_parts<kFirst, 1>(total, parts, begin, count);
    case 2:
      return add_parts<kFirst, 2>(total, parts, begin, count);
    case 3:
      return add_parts<kFirst, 3>(total, parts, begin, count);
    default:
      return add_parts<kFirst, 4>(total, parts, begin, count);
  }
}

// The output of a sum, which may be one of the parts.
struct Target {
  float* out;
  bool accumulate;
  bool streams;
  float* sums;  // block sums of squares of the result; may be null
};

inline __attribute__((always_inline)) void finish(const Target& target, const float* total,
                                                  std::int64_t begin, std::int64_t count) {
  float* out = target.out + begin;
  if (target.accumulate) {
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] += total[i];
    }
  } else if (target.streams && count == kBlock) {
    stream(out, total, kBlock * static_cast<std::int64_t>(sizeof(float)));
  } else {
    std::copy_n(total, count, out);
  }
  if (target.sums != nullptr) {
    // Streamed values are not read again; they equal the total.
    block_sums(target.sums + begin / kBlock, target.accumulate ? out : total, count);
  }
}

template <typename Received>
inline __attribute__((always_inline)) void sum_block(const Target& target,
                                                     const Received* const* parts, int size,
                                                     std::int64_t begin, std::int64_t count) {
  // Separate from the output, which may be one of the parts.
  alignas(kBlock) float total[kBlock];
  add_up_to_four<true>(total, parts, std::min(size, 4), begin, count);
  for (int part = 4; part < size; part += 4) {
    add_up_to_four<false>(total, parts + part, std::min(size - part, 4), begin, count);
  }
  finish(target, total, begin, count);
}

template <typename Received>
POPLAR_CLONES void sum_range(const Target& target, const std::vector<const Received*>& parts,
                             std::int64_t begin, std::int64_t end) {
  const int size = static_cast<int>(parts.size());
  // Whole blocks separately: loops of a known length need no remainder code.
  const std::int64_t whole = begin + (end - begin) / kBlock * kBlock;
  for (std::int64_t block = begin; block < whole; block += kBlock) {
    sum_block(target, parts.data(), size, block, kBlock);
  }
  if (whole < end) {
    sum_block(target, parts.data(), size, whole, end - whole);
  }
}

#ifdef POPLAR_WIDE
// Whole blocks of fp16 parts, widened by the CPU's instruction before they are added.
POPLAR_WIDE void sum_wide_blocks(const Target& target, const std::vector<const Half*>& parts,
                                 std::int64_t begin, std::int64_t end) {
  alignas(kLine) float total[kBlock];
  alignas(kLine) float part[kBlock];
  for (std::int64_t block = begin; block < end; block += kBlock) {
    widen_block(total, parts[0] + block);
    for (std::size_t i = 1; i < parts.size(); ++i) {
      widen_block(part, parts[i] + block);
      for (std::int64_t k = 0; k < kBlock; ++k) {
        total[k] += part[k];
      }
    }
    finish(target, total, block, kBlock);
  }
}
#endif

// By the fastest loop on this machine.
template <typename Received>
void sum_fast(const Target& target, const std::vector<const Received*>& parts, std::int64_t begin,
              std::int64_t end) {
#ifdef POPLAR_WIDE
  if constexpr (std::is_same_v<Received, Half>) {
    if (has_wide_registers()) {
      const std::int64_t whole = begin + (end - begin) / kBlock * kBlock;
      sum_wide_blocks(target, parts, begin, whole);
      begin = whole;
    }
  }
#endif
  sum_range(target, parts, begin, end);
}

template <typename Received>
void sum(const Target& target, const std::vector<const Received*>& parts, std::int64_t numel) {
  const std::int64_t grain =
      std::max(kBlock, kGrain / static_cast<std::int64_t>(parts.size()) / kBlock * kBlock);
  const std::int64_t blocks = (numel + kBlock - 1) / kBlock;
  parallel(blocks, grain / kBlock, [&](std::int64_t begin, std::int64_t end) {
    sum_fast(target, parts, begin * kBlock, std::min(end * kBlock, numel));
    end_streaming();
  });
}

// As `sum`, but other processes may do part of the work: see poplar/work_sharing.h.
template <typename Received>
void sum_shared_chunks(const Target& target, const std::vector<const Received*>& parts,
                       std::int64_t numel, WorkCounters& work_counters) {
  parallel(chunks_of(numel), 1, [&](std::int64_t first, std::int64_t last) {
    const auto add = [&](std::int64_t begin, std::int64_t end) {
      sum_fast(target, parts, begin, end);
      end_streaming();
    };
    for (std::int64_t i = first; i < last && work_on_next(work_counters, numel, add); ++i) {
    }
  });
}

void sum_into(Tensor& out, const std::vector<Tensor>& received, bool accumulate,
              WorkCounters* work_counters, float* sums) {
  Target target{static_cast<float*>(out.mutable_data_ptr()), accumulate, false, sums};
  // An output that was just read is in the cache, so a normal store is cheaper.
  const bool was_read = std::any_of(received.begin(), received.end(), [&](const Tensor& part) {
    return part.const_data_ptr() == out.const_data_ptr();
  });
  target.streams = !accumulate && !was_read &&
                   can_stream(target.out, out.numel() * static_cast<std::int64_t>(sizeof(float)));
  with_type(dtype_of(received[0], "rank_sum_: received"), [&](auto* type) {
    using Received = std::remove_pointer_t<decltype(type)>;
    std::vector<const Received*> parts;
    for (const Tensor& part : received) {
      parts.push_back(static_cast<const Received*>(part.const_data_ptr()));
    }
    if (work_counters == nullptr) {
      sum(target, parts, out.numel());
    } else {
      sum_shared_chunks(target, parts, out.numel(), *work_counters);
    }
  });
}

}  // namespace

void rank_sum_(Tensor out, std::vector<Tensor> received, bool accumulate,
               std::optional<Tensor> sums) {
  check_rank_sum("rank_sum_", out, received);
  sum_into(out, received, accumulate, nullptr, sums_of("rank_sum_", out, sums));
}

void rank_sum_chunks_(Tensor out, std::vector<Tensor> received, Tensor work_counters,
                      std::optional<Tensor> sums) {
  check_rank_sum("rank_sum_chunks_", out, received);
  check_work_counters<WorkCounters>(work_counters);
  sum_into(out, received, false, static_cast<WorkCounters*>(work_counters.mutable_data_ptr()),
           sums_of("rank_sum_chunks_", out, sums));
}

}  // namespace poplar::cpu

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

// The outputs of a sum: one or several tensors of one dtype, which may be among the parts.
template <typename Out>
struct Targets {
  std::vector<Out*> outs;
  bool accumulate;
  bool streams;
  float* sums;  // block sums of squares of the first output's result; may be null
};

template <typename Out>
inline __attribute__((always_inline)) void finish(const Targets<Out>& targets, const float* total,
                                                  std::int64_t begin, std::int64_t count) {
  for (Out* out : targets.outs) {
    Out* target = out + begin;
    if (targets.accumulate) {
      for (std::int64_t i = 0; i < count; ++i) {
        target[i] = narrow<Out>(widen(target[i]) + total[i]);
      }
    } else if (targets.streams && count == kBlock) {
      alignas(kBlock) Out block[kBlock];
      for (std::int64_t i = 0; i < kBlock; ++i) {
        block[i] = narrow<Out>(total[i]);
      }
      stream(target, block, kBlock * static_cast<std::int64_t>(sizeof(Out)));
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        target[i] = narrow<Out>(total[i]);
      }
    }
  }
}

template <typename Out>
inline __attribute__((always_inline)) void finish_with_sums(const Targets<Out>& targets,
                                                            const float* total, std::int64_t begin,
                                                            std::int64_t count) {
  finish(targets, total, begin, count);
  if (targets.sums != nullptr) {
    float* sum = targets.sums + begin / kBlock;
    // Streamed values are not read again; they equal the total.
    const Out* out = targets.outs[0] + begin;
    if (targets.accumulate || !std::is_same_v<Out, float>) {
      block_sums(sum, out, count);
    } else {
      block_sums(sum, total, count);
    }
  }
}

template <typename Received, typename Out>
inline __attribute__((always_inline)) void sum_block(const Targets<Out>& targets,
                                                     const Received* const* parts, int size,
                                                     std::int64_t begin, std::int64_t count) {
  // Separate from the outputs, which may be among the parts.
  alignas(kBlock) float total[kBlock];
  add_up_to_four<true>(total, parts, std::min(size, 4), begin, count);
  for (int part = 4; part < size; part += 4) {
    add_up_to_four<false>(total, parts + part, std::min(size - part, 4), begin, count);
  }
  finish_with_sums(targets, total, begin, count);
}

template <typename Received, typename Out>
POPLAR_CLONES void sum_range(const Targets<Out>& targets, const std::vector<const Received*>& parts,
                             std::int64_t begin, std::int64_t end) {
  const int size = static_cast<int>(parts.size());
  // Whole blocks separately: loops of a known length need no remainder code.
  const std::int64_t whole = begin + (end - begin) / kBlock * kBlock;
  for (std::int64_t block = begin; block < whole; block += kBlock) {
    sum_block(targets, parts.data(), size, block, kBlock);
  }
  if (whole < end) {
    sum_block(targets, parts.data(), size, whole, end - whole);
  }
}

#ifdef POPLAR_WIDE
// Whole blocks of fp16 parts, widened by the CPU's instruction before they are added.
template <typename Out>
POPLAR_WIDE void sum_wide_blocks(const Targets<Out>& targets, const std::vector<const Half*>& parts,
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
    finish_with_sums(targets, total, block, kBlock);
  }
}
#endif

// By the fastest loop on this machine.
template <typename Received, typename Out>
void sum_fast(const Targets<Out>& targets, const std::vector<const Received*>& parts,
              std::int64_t begin, std::int64_t end) {
#ifdef POPLAR_WIDE
  if constexpr (std::is_same_v<Received, Half>) {
    if (has_wide_registers()) {
      const std::int64_t whole = begin + (end - begin) / kBlock * kBlock;
      sum_wide_blocks(targets, parts, begin, whole);
      begin = whole;
    }
  }
#endif
  sum_range(targets, parts, begin, end);
}

template <typename Received, typename Out>
void sum(const Targets<Out>& targets, const std::vector<const Received*>& parts,
         std::int64_t numel) {
  const std::int64_t grain =
      std::max(kBlock, kGrain / static_cast<std::int64_t>(parts.size()) / kBlock * kBlock);
  const std::int64_t blocks = (numel + kBlock - 1) / kBlock;
  parallel(blocks, grain / kBlock, [&](std::int64_t begin, std::int64_t end) {
    sum_fast(targets, parts, begin * kBlock, std::min(end * kBlock, numel));
    end_streaming();
  });
}

// As `sum`, but other processes may do part of the work: see poplar/work_sharing.h.
template <typename Received, typename Out>
void sum_shared_chunks(const Targets<Out>& targets, const std::vector<const Received*>& parts,
                       std::int64_t numel, WorkCounters& work_counters) {
  parallel(chunks_of(numel), 1, [&](std::int64_t first, std::int64_t last) {
    const auto add = [&](std::int64_t begin, std::int64_t end) {
      sum_fast(targets, parts, begin, end);
      end_streaming();
    };
    for (std::int64_t i = first; i < last && work_on_next(work_counters, numel, add); ++i) {
    }
  });
}

template <typename Out>
void sum_into(std::vector<Tensor>& outs, const std::vector<Tensor>& received, bool accumulate,
              WorkCounters* work_counters, float* sums) {
  // 16-bit outputs with sums are read again, so they are not streamed.
  Targets<Out> targets{
      {}, accumulate, !accumulate && (sums == nullptr || std::is_same_v<Out, float>), sums};
  const std::int64_t bytes = outs[0].numel() * static_cast<std::int64_t>(sizeof(Out));
  for (Tensor& out : outs) {
    targets.outs.push_back(static_cast<Out*>(out.mutable_data_ptr()));
    // An output that was just read is in the cache, so a normal store is cheaper.
    const bool was_read = std::any_of(received.begin(), received.end(), [&](const Tensor& part) {
      return part.const_data_ptr() == out.const_data_ptr();
    });
    targets.streams = targets.streams && !was_read && can_stream(targets.outs.back(), bytes);
  }
  with_type(dtype_of(received[0], "rank_sum_: received"), [&](auto* type) {
    using Received = std::remove_pointer_t<decltype(type)>;
    std::vector<const Received*> parts;
    for (const Tensor& part : received) {
      parts.push_back(static_cast<const Received*>(part.const_data_ptr()));
    }
    if (work_counters == nullptr) {
      sum(targets, parts, outs[0].numel());
    } else {
      sum_shared_chunks(targets, parts, outs[0].numel(), *work_counters);
    }
  });
}

void sum_for_each(std::vector<Tensor>& outs, const std::vector<Tensor>& received,
                  WorkCounters* work_counters, float* sums) {
  if (outs.empty()) {
    return;
  }
  check_rank_sum_each(outs, received);
  with_type(dtype_of(outs[0], "rank_sum_each_: outs"), [&](auto* type) {
    sum_into<std::remove_pointer_t<decltype(type)>>(outs, received, false, work_counters, sums);
  });
}

}  // namespace

void rank_sum_(Tensor out, std::vector<Tensor> received, bool accumulate,
               std::optional<Tensor> sums) {
  check_rank_sum(out, received);
  std::vector<Tensor> outs{out};
  sum_into<float>(outs, received, accumulate, nullptr, sums_of("rank_sum_", out, sums));
}

void rank_sum_each_(std::vector<Tensor> outs, std::vector<Tensor> received) {
  sum_for_each(outs, received, nullptr, nullptr);
}

void rank_sum_chunks_(std::vector<Tensor> outs, std::vector<Tensor> received, Tensor work_counters,
                      std::optional<Tensor> sums) {
  check_work_counters(work_counters, sizeof(WorkCounters));
  float* blocks = outs.empty() ? nullptr : sums_of("rank_sum_chunks_", outs[0], sums);
  sum_for_each(outs, received, static_cast<WorkCounters*>(work_counters.mutable_data_ptr()),
               blocks);
}

}  // namespace poplar::cpu

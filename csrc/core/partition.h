// Partitions of flat buffers: integer arithmetic, free of torch and of Python.
//
// Results are exact and the same on every platform (128-bit integers, no floating point after the
// weights have been read), and every function is a single sweep over its inputs.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

namespace poplar {

// (parameter, rank, start in the parameter, length) and (source, target, start, stop).
using Slice = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
using Transfer = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

// All throw std::invalid_argument on bad input. Contracts: the Python docstrings in module.cpp.
std::vector<std::int64_t> apportion(std::int64_t total, const std::vector<double>& weights);

std::vector<std::int64_t> shard_boundaries(std::int64_t numel, const std::vector<double>& shares,
                                           std::int64_t alignment);

std::vector<Slice> parameter_slices(const std::vector<std::int64_t>& offsets,
                                    const std::vector<std::int64_t>& numels,
                                    const std::vector<std::int64_t>& boundaries);

std::vector<Transfer> transfers(const std::vector<std::int64_t>& before,
                                const std::vector<std::int64_t>& after);

}  // namespace poplar

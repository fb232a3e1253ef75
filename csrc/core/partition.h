// Partitions of flat buffers: integer arithmetic, free of torch and of Python.
//
// Results are exact and the same on every platform (128-bit integers, no floating point after the
// weights have been read), and every function is a single sweep over its inputs.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

namespace poplar {

// Cuts `total` into integers in proportion to `weights`, by largest remainder: they sum to `total`,
// none is a whole unit off its exact quota, and a weight of 0 gets 0. Ties go to the lower index.
// Exact for integers and for weights within a factor of 512 of each other; smaller ones are rounded
// at 2^-62 of the largest. Throws std::invalid_argument for a negative total, for weights that are
// negative or not finite, and if none is above 0.
std::vector<std::int64_t> apportion(std::int64_t total, const std::vector<double>& weights);

// The offsets of one contiguous slice per rank, the first 0, the last `numel`; rank r owns
// [offsets[r], offsets[r + 1]). All are multiples of `alignment`, and no slice is more than one
// `alignment` larger or smaller than its share. Throws std::invalid_argument for shares that are
// negative, not finite or do not sum to 1, and for `numel` that is no multiple of `alignment`.
std::vector<std::int64_t> shard_boundaries(std::int64_t numel, const std::vector<double>& shares,
                                           std::int64_t alignment);

// (source rank, target rank, start, stop) in elements of the flat buffer.
using Transfer = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

// The transfers that change the slices of one buffer, ascending, together all of it. Elements that
// stay on their rank have the same source and target. The number of ranks may differ. Throws
// std::invalid_argument for boundaries that do not start at 0 and ascend, and for those of buffers
// of different sizes.
std::vector<Transfer> transfers(const std::vector<std::int64_t>& before,
                                const std::vector<std::int64_t>& after);

}  // namespace poplar

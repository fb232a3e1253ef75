// The planner's inner loops: how samples are cut into passes. Free of torch and of Python.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace poplar {

// For 0, 1, ... `most` samples: the least time in passes, and how many samples the last one has.
// `passes[b]` is what a pass of b samples takes, from 0 on. Of equally fast cuts the one with the
// largest last pass. Empty but for 0 samples if no pass holds one.
std::pair<std::vector<double>, std::vector<std::int64_t>> cheapest_passes(
    const std::vector<double>& passes, std::int64_t most);

// The parts that hold `total` together and waste least: the first of them as wasteful as
// `last_wastes` says of `last_sizes`, all others as `wastes` of `sizes` (they ascend). One part may
// be less than full, which wastes `rate` for each that is missing; sums above `most_waste` are not
// of interest.
std::vector<std::int64_t> least_waste(const std::vector<double>& wastes,
                                      const std::vector<std::int64_t>& sizes,
                                      const std::vector<double>& last_wastes,
                                      const std::vector<std::int64_t>& last_sizes, double rate,
                                      double most_waste, std::int64_t total);

}  // namespace poplar

// The planner's inner loops: how samples are divided into passes. Needs neither torch nor Python.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace poplar {

// For 0, 1, ... `most` samples: the least seconds of passes that hold them, and the samples of the
// last pass. `passes[b]` is the seconds of a pass of b samples, from 0 on. Ties go to the largest
// last pass. Only the entry for 0 samples is returned if no pass holds a sample.
std::pair<std::vector<double>, std::vector<std::int64_t>> cheapest_passes(
    const std::vector<double>& passes, std::int64_t most);

// The cheapest parts that hold `total` together. A part that holds up to `sizes[i]` costs
// `costs[i]`; one part costs `dearest[i]` instead. All three ascend. Returns the cost, and how much
// each part holds: the dearest part last, the others in ascending order.
std::pair<double, std::vector<std::int64_t>> cheapest_cover(const std::vector<std::int64_t>& sizes,
                                                            const std::vector<double>& costs,
                                                            const std::vector<double>& dearest,
                                                            std::int64_t total);

}  // namespace poplar

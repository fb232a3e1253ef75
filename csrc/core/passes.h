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

// The parts that hold `total` together in the least time, of which one is dearer: a part that holds
// up to `sizes[i]` takes `costs[i]`, that one `dearest[i]`; all three ascend. What it takes, and
// how much each part holds, the dearer one last and of the others small ones first.
std::pair<double, std::vector<std::int64_t>> cheapest_cover(const std::vector<std::int64_t>& sizes,
                                                            const std::vector<double>& costs,
                                                            const std::vector<double>& dearest,
                                                            std::int64_t total);

}  // namespace poplar

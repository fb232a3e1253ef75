// The planner's inner loops: dividing samples into passes. Free of torch and of Python.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace poplar {

// For 0, 1, ... `most` samples: the least seconds in passes, and the samples of the last pass.
// `passes[b]` is the seconds of a pass of b samples. If several last passes tie, the largest is
// used. The result has only the entry for 0 samples if `passes` allows no sample.
std::pair<std::vector<double>, std::vector<std::int64_t>> cheapest_passes(
    const std::vector<double>& passes, std::int64_t most);

// The cheapest parts that add up to `total`. One part is more expensive: a part of up to `sizes[i]`
// costs `costs[i]`, the expensive one `expensive[i]`; all three ascend. Returns the cost
// and the sizes of the parts, ascending, the expensive one last.
std::pair<double, std::vector<std::int64_t>> cheapest_cover(const std::vector<std::int64_t>& sizes,
                                                            const std::vector<double>& costs,
                                                            const std::vector<double>& expensive,
                                                            std::int64_t total);

}  // namespace poplar

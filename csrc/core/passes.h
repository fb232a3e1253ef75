// The planner's inner loops: dividing samples into passes. Free of torch and of Python.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace poplar {

// The fastest divisions of 0, 1, ... samples into passes.
struct PassTable {
  std::vector<double> seconds;
  std::vector<std::int64_t> first;  // samples of a first pass above the cap of later ones, or 0
  std::vector<std::int64_t> last;   // samples of the last pass of those without such a first pass
};

// `passes[b]` is the seconds of a pass of b samples, up to the largest first pass; passes after it
// have at most `later` samples. If several last passes tie, the largest is used. The table ends at
// `most` samples or where more samples fit into no passes; its seconds do not decrease.
PassTable cheapest_passes(const std::vector<double>& passes, std::int64_t later, std::int64_t most);

// The cheapest two parts or more that add up to `total`. The first part of up to `first_sizes[i]`
// costs `first_costs[i]`; others of up to `sizes[i]` cost `costs[i]`, and the last one
// `last_costs[i]`, which must be at least as much: this is not checked. All ascend. Returns the
// cost and the sizes of the parts: the first, the others ascending, the last. Throws
// std::invalid_argument if there are no parts, a size is below 1, the number of costs is another
// one, the total is below 2, or no parts add up to it at a finite cost.
std::pair<double, std::vector<std::int64_t>> cheapest_cover(
    const std::vector<std::int64_t>& first_sizes, const std::vector<double>& first_costs,
    const std::vector<std::int64_t>& sizes, const std::vector<double>& costs,
    const std::vector<double>& last_costs, std::int64_t total);

// For each number up to `total` the largest sum of `values[i][parts[i]]` with parts that add up to
// it, -infinity if there are none, and the parts for `total`. Takes `total` steps for each value.
// Throws std::invalid_argument for a negative total.
std::pair<std::vector<double>, std::vector<std::int64_t>> largest_sum(
    const std::vector<std::vector<double>>& values, std::int64_t total);

}  // namespace poplar

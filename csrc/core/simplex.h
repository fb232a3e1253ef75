// A small dense linear program by the dual simplex method. Contract and reasons:
// poplar/planner/shard_allocation.py.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace poplar {

// Factors of a row by variable; missing factors are 0.
using Row = std::map<std::size_t, double>;

// Minimizes costs . x over x >= 0 with rows . x <= bounds; no cost is negative. Returns the minimum
// and its variables, or nothing if no x satisfies all rows. Throws std::runtime_error after too
// many pivots, std::invalid_argument for a variable without a cost or a wrong number of bounds.
std::optional<std::pair<double, std::vector<double>>> minimise(std::vector<double> costs,
                                                               const std::vector<Row>& rows,
                                                               std::vector<double> bounds);

}  // namespace poplar

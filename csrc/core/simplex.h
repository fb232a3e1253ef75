// A small dense linear programme by the dual simplex method; the contract and the reasons are in
// poplar/planner/linear_program.py.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace poplar {

// A row's factors by variable; those that are left out are 0.
using Row = std::map<std::size_t, double>;

// Minimises costs . x over x >= 0 with rows . x <= bounds; no cost is negative. The minimum and
// where it is; nothing if no x satisfies all rows. Throws std::runtime_error after too many pivots,
// std::invalid_argument for a row of a variable without a cost, or rows without bounds.
std::optional<std::pair<double, std::vector<double>>> minimise(std::vector<double> costs,
                                                               const std::vector<Row>& rows,
                                                               std::vector<double> bounds);

}  // namespace poplar

// A small dense linear program, solved by the dual simplex method; the reasons are in
// poplar/planner/linear_program.py.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace poplar {

// The factors of a row by variable; 0 if left out.
using Row = std::map<std::size_t, double>;

// Minimizes costs . x over x >= 0 with rows . x <= bounds; costs must not be negative. Returns the
// minimum and its x, or nothing if no x satisfies all rows. Throws std::runtime_error after too
// many pivots, std::invalid_argument if a row has a variable without a cost or no bound.
std::optional<std::pair<double, std::vector<double>>> minimise(std::vector<double> costs,
                                                               const std::vector<Row>& rows,
                                                               std::vector<double> bounds);

}  // namespace poplar

// A small dense linear programme by the dual simplex method; the contract and the reasons are in
// poplar/planning/linear_programme.py.
#pragma once

#include <optional>
#include <utility>
#include <vector>

namespace poplar {

// Minimises costs . x over x >= 0 with rows . x <= bounds; no cost is negative. The minimum and
// where it is; nothing if no x satisfies all rows. Throws std::runtime_error after too many pivots.
std::optional<std::pair<double, std::vector<double>>> minimise(
    std::vector<double> costs, std::vector<std::vector<double>> rows, std::vector<double> bounds);

}  // namespace poplar

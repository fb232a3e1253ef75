#include "simplex.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>

namespace poplar {
namespace {

constexpr double kTolerance = 1e-12;  // for programs whose numbers are around 1
constexpr double kRounding = 1e-8;    // smaller violations of a row are rounding errors
// Per row and column. Bland's rule prevents cycles but is slow, so it is only used after this many
// pivots.
constexpr std::size_t kPivotsBeforeBland = 10;
constexpr std::size_t kMostPivots = 200;
constexpr std::size_t kNone = static_cast<std::size_t>(-1);

class Tableau {
 public:
  Tableau(std::vector<double> costs, std::vector<std::vector<double>> rows,
          std::vector<double> bounds)
      : costs_(std::move(costs)),
        rows_(std::move(rows)),
        bounds_(std::move(bounds)),
        outside_(costs_.size()),
        inside_(rows_.size()) {
    std::iota(outside_.begin(), outside_.end(), std::size_t{0});
    std::iota(inside_.begin(), inside_.end(), costs_.size());
  }

  // Whether some x satisfies all rows; if so, `value` and `variables` are the minimum.
  bool solve() {
    const std::size_t size = costs_.size() + rows_.size();
    for (std::size_t pivots = 0; pivots < kMostPivots * size; ++pivots) {
      const std::size_t row = leaving(pivots >= kPivotsBeforeBland * size);
      if (row == kNone) {
        return true;
      }
      const std::size_t column = entering(row);
      if (column == kNone) {
        if (bounds_[row] < -kRounding) {
          return false;
        }
        bounds_[row] = 0.0;
        continue;
      }
      pivot(row, column);
      std::swap(inside_[row], outside_[column]);
    }
    throw std::runtime_error("a linear program of " + std::to_string(rows_.size()) +
                             " rows did not end within " + std::to_string(kMostPivots * size) +
                             " pivots");
  }

  double value() const { return value_; }

  std::vector<double> variables() const {
    std::vector<double> found(costs_.size(), 0.0);
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      if (inside_[row] < found.size()) {
        found[inside_[row]] = std::max(0.0, bounds_[row]);
      }
    }
    return found;
  }

 private:
  // The most violated row; with Bland's rule, the violated row of least index.
  std::size_t leaving(bool bland) const {
    std::size_t found = kNone;
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      if (bounds_[row] < -kTolerance &&
          (found == kNone ||
           (bland ? inside_[row] < inside_[found] : bounds_[row] < bounds_[found]))) {
        found = row;
      }
    }
    return found;
  }

  // The column that makes the row feasible at the least cost.
  std::size_t entering(std::size_t row) const {
    std::size_t found = kNone;
    std::tuple<double, std::size_t> least;
    for (std::size_t column = 0; column < costs_.size(); ++column) {
      const double factor = rows_[row][column];
      if (factor < -kTolerance) {
        const std::tuple<double, std::size_t> ratio{costs_[column] / -factor, outside_[column]};
        if (found == kNone || ratio < least) {
          found = column;
          least = ratio;
        }
      }
    }
    return found;
  }

  // Exchange a row's variable with a column's.
  void pivot(std::size_t leaving, std::size_t entering) {
    const double inverse = 1.0 / rows_[leaving][entering];
    std::vector<double> pivot_row = rows_[leaving];
    for (double& factor : pivot_row) {
      factor *= inverse;
    }
    pivot_row[entering] = inverse;
    const double pivot_bound = bounds_[leaving] * inverse;
    std::vector<std::size_t> filled;  // the nonzero columns, often few
    for (std::size_t column = 0; column < pivot_row.size(); ++column) {
      if (pivot_row[column] != 0.0) {
        filled.push_back(column);
      }
    }
    const auto subtract = [&](std::vector<double>& from, double factor) {
      from[entering] = 0.0;
      for (const std::size_t column : filled) {
        from[column] -= factor * pivot_row[column];
      }
    };
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const double factor = rows_[row][entering];
      if (row != leaving && factor != 0.0) {
        subtract(rows_[row], factor);
        bounds_[row] -= factor * pivot_bound;
      }
    }
    rows_[leaving] = pivot_row;
    bounds_[leaving] = pivot_bound;
    const double factor = costs_[entering];
    if (factor != 0.0) {
      subtract(costs_, factor);
      value_ += factor * pivot_bound;
    }
  }

  std::vector<double> costs_;
  std::vector<std::vector<double>> rows_;
  std::vector<double> bounds_;
  std::vector<std::size_t> outside_;
  std::vector<std::size_t> inside_;
  double value_ = 0.0;
};

}  // namespace

std::optional<std::pair<double, std::vector<double>>> minimise(std::vector<double> costs,
                                                               const std::vector<Row>& rows,
                                                               std::vector<double> bounds) {
  if (rows.size() != bounds.size()) {
    throw std::invalid_argument("minimise: " + std::to_string(rows.size()) + " rows and " +
                                std::to_string(bounds.size()) + " bounds");
  }
  std::vector<std::vector<double>> dense(rows.size(), std::vector<double>(costs.size(), 0.0));
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (const auto& [variable, factor] : rows[row]) {
      if (variable >= costs.size()) {
        throw std::invalid_argument("minimise: variable " + std::to_string(variable) + " of " +
                                    std::to_string(costs.size()));
      }
      dense[row][variable] = factor;
    }
  }
  Tableau tableau(std::move(costs), std::move(dense), std::move(bounds));
  if (!tableau.solve()) {
    return std::nullopt;
  }
  return std::pair{tableau.value(), tableau.variables()};
}

}  // namespace poplar

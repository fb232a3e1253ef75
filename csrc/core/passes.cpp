#include "passes.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <stdexcept>
#include <string>

namespace poplar {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-12;
constexpr double kStraight = 1e-14;  // a curve that is straight up to so much of its values

// Parts of one kind: each holds up to `sizes[i]` and costs `costs[i]`.
struct Parts {
  const std::vector<std::int64_t>& sizes;
  const std::vector<double>& costs;

  // The cost of the smallest part that holds this many.
  double cost(std::int64_t many) const {
    const std::size_t part = std::lower_bound(sizes.begin(), sizes.end(), many) - sizes.begin();
    return part < sizes.size() ? costs[part] : kNever;
  }
};

// Covers whose parts are all full but one, which is the last or the first: an upper bound.
double cheapest_simple_cover(const Parts& first, const Parts& usual, const Parts& last,
                             std::int64_t total) {
  double cheapest = kNever;
  const auto with_first = [&](std::int64_t begin, std::int64_t size) {
    const std::int64_t left = total - begin;
    if (begin < 1 || left < 1) {
      return;
    }
    const std::int64_t before = (left - 1) / size;
    const double others = before > 0 ? static_cast<double>(before) * usual.cost(size) : 0.0;
    cheapest = std::min(cheapest, first.cost(begin) + others + last.cost(left - before * size));
  };
  for (const std::int64_t size : usual.sizes) {
    const std::int64_t rest = total % size > 0 ? total % size : size;
    with_first(rest, size);
    with_first(std::min(size, total - 1), size);
    with_first(std::min(first.sizes.back(), total - 1), size);
    // Parts that differ by at most 1.
    const std::int64_t count = std::max<std::int64_t>(2, (total + size - 1) / size);
    const std::int64_t even = total / count;
    const std::int64_t larger = total % count;
    if (even > 0) {
      const auto of = [&](std::int64_t position) { return even + (position < larger ? 1 : 0); };
      double sum = first.cost(of(count - 1)) + last.cost(of(0));
      const std::int64_t large = std::max<std::int64_t>(0, larger - 1);
      const std::int64_t small = count - 2 - large;
      sum += large > 0 ? static_cast<double>(large) * usual.cost(even + 1) : 0.0;
      sum += small > 0 ? static_cast<double>(small) * usual.cost(even) : 0.0;
      cheapest = std::min(cheapest, sum);
    }
  }
  return cheapest;
}

// Sizes of a pass, up to `end`, whose seconds lie on a line. For each number of samples the best of
// them leaves the samples before it with the least `rest - slope * samples`: the minimum of a
// window that slides by one sample. So a table costs as much as the curve has straight pieces.
class StraightPiece {
 public:
  StraightPiece(const std::vector<double>& passes, std::int64_t begin, std::int64_t end)
      : begin_(begin), end_(begin) {
    double low = -kNever;
    double high = kNever;
    for (std::int64_t size = begin + 1; size <= end; ++size) {
      const double step = static_cast<double>(size - begin);
      const double rise = passes[size] - passes[begin];
      low = std::max(low, (rise - kStraight * passes[size]) / step);
      high = std::min(high, (rise + kStraight * passes[size]) / step);
      if (low > high) {
        break;
      }
      slope_ = low + (high - low) / 2.0;
      end_ = size;
    }
  }

  std::int64_t end() const { return end_; }

  // Lowers `least` to the seconds of the best last pass of these sizes, and sets `chosen` to its
  // size. Call it for 1, 2, ... samples; `rest` has the seconds of fewer samples.
  void improve(const std::vector<double>& passes, const std::vector<double>& rest,
               std::int64_t samples, double& least, std::int64_t& chosen) {
    const std::int64_t before = samples - begin_;
    if (before < 0) {
      return;
    }
    const double relative = rest[before] - slope_ * static_cast<double>(before);
    while (!window_.empty() && window_.back().first > relative) {
      window_.pop_back();
    }
    window_.emplace_back(relative, before);
    while (window_.front().second < samples - end_) {
      window_.pop_front();
    }
    // The largest first: the others may be better by no more than rounding.
    for (const std::int64_t size : {std::min(end_, samples), samples - window_.front().second}) {
      const double end = passes[size] + rest[samples - size];
      if (end < least) {
        least = end;
        chosen = size;
      }
    }
  }

 private:
  std::int64_t begin_;
  std::int64_t end_;
  double slope_ = 0.0;
  std::deque<std::pair<double, std::int64_t>> window_;
};

// The pieces of the sizes from `begin` to `end`, largest first.
std::vector<StraightPiece> straight_pieces(const std::vector<double>& passes, std::int64_t begin,
                                           std::int64_t end) {
  std::vector<StraightPiece> pieces;
  for (; begin <= end; begin = pieces.back().end() + 1) {
    pieces.emplace_back(passes, begin, end);
  }
  std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

}  // namespace

PassTable cheapest_passes(const std::vector<double>& passes, std::int64_t later,
                          std::int64_t most) {
  const auto largest = static_cast<std::int64_t>(passes.size()) - 1;
  PassTable table{{0.0}, {0}, {0}};
  if (largest < 1) {
    return table;
  }
  const std::int64_t cap = std::min(largest, later);
  if (cap < 1) {  // one pass
    for (std::int64_t samples = 1; samples <= std::min(most, largest); ++samples) {
      table.seconds.push_back(passes[samples]);
      table.first.push_back(samples);
      table.last.push_back(0);
    }
    return table;
  }
  std::int64_t period = 1;
  for (std::int64_t size = 2; size <= cap; ++size) {
    if (passes[size] * static_cast<double>(period) <= passes[period] * static_cast<double>(size)) {
      period = size;
    }
  }
  // Any `period` numbers have some whose sum is a multiple of `period`. So a division needs fewer
  // passes of another size than the one with the best rate, and more samples only add passes of it.
  const std::int64_t enough = (period - 1) * cap + period;
  auto later_sizes = straight_pieces(passes, 1, cap);
  auto larger_sizes = straight_pieces(passes, cap + 1, largest);
  std::vector<double> rest{0.0};  // divisions without a larger first pass
  for (std::int64_t samples = 1; samples <= most; ++samples) {
    double least = kNever;
    std::int64_t chosen = period;
    if (samples > enough) {
      least = passes[period] + rest[samples - period];
    } else {
      for (auto& piece : later_sizes) {
        piece.improve(passes, rest, samples, least, chosen);
      }
    }
    rest.push_back(least);
    table.last.push_back(chosen);
    std::int64_t first = 0;
    for (auto& piece : larger_sizes) {
      piece.improve(passes, rest, samples, least, first);
    }
    table.seconds.push_back(std::max(least, table.seconds.back()));  // rounding
    table.first.push_back(first);
  }
  return table;
}

std::pair<double, std::vector<std::int64_t>> cheapest_cover(
    const std::vector<std::int64_t>& first_sizes, const std::vector<double>& first_costs,
    const std::vector<std::int64_t>& sizes, const std::vector<double>& costs,
    const std::vector<double>& last_costs, std::int64_t total) {
  if (sizes.empty() || first_sizes.empty() || first_costs.size() != first_sizes.size() ||
      costs.size() != sizes.size() || last_costs.size() != sizes.size() || sizes.front() < 1 ||
      first_sizes.front() < 1 || total < 2) {
    throw std::invalid_argument(
        "cheapest_cover needs sizes of at least 1, a cost for each size of a first part, two for "
        "each size of other parts, and a total of at least 2");
  }
  const Parts first{first_sizes, first_costs};
  const Parts usual{sizes, costs};
  const Parts last{sizes, last_costs};
  double rate = kNever;
  std::int64_t period = 1;
  for (std::size_t part = 0; part < sizes.size(); ++part) {
    const double own = costs[part] / static_cast<double>(sizes[part]);
    if (own <= rate) {
      rate = own;
      period = sizes[part];
    }
  }
  // As in `cheapest_passes`: larger totals only add parts with the best rate.
  const std::int64_t enough = first_sizes.back() + (period - 1) * sizes.back() + sizes.back();
  const std::int64_t repeated = total > enough ? (total - enough) / period : 0;
  total -= repeated * period;
  // A cover with more waste than a known one is not the cheapest. So the dynamic program only has
  // to consider few parts and few partial sums. Only the first part may waste less than nothing.
  const double known = cheapest_simple_cover(first, usual, last, total);
  const double most_waste = known - rate * static_cast<double>(total) + kRounding * known;
  std::vector<double> wasted(total, kNever);
  std::vector<std::int64_t> added(total, 0);
  for (std::size_t part = 0; part < first_sizes.size(); ++part) {
    const std::int64_t size = std::min(first_sizes[part], total - 1);
    const double waste = first_costs[part] - rate * static_cast<double>(size);
    if (waste < wasted[size]) {
      wasted[size] = waste;
      added[size] = size;
    }
  }
  // A part of size m costs at least m times the best rate; the cost beyond that is its waste.
  std::vector<std::pair<double, std::int64_t>> some;
  for (std::size_t part = 0; part < sizes.size(); ++part) {
    some.emplace_back(costs[part] - rate * static_cast<double>(sizes[part]), sizes[part]);
  }
  std::sort(some.begin(), some.end());
  std::vector<double> ends(total, kNever);  // the least waste of a last part of up to so many
  for (std::int64_t held = 1; held < total; ++held) {
    ends[held] = std::min(ends[held - 1], last.cost(held) - rate * static_cast<double>(held));
  }
  for (std::int64_t held = 1; held < total - 1; ++held) {
    const double most_before_end = most_waste - ends[total - held - 1];
    for (const auto& [waste, size] : some) {
      if (wasted[held] + waste > most_before_end) {
        break;
      }
      // A part that is not full leaves one for the last part: more would make that one costlier.
      const std::int64_t next = std::min(held + size, total - 1);
      const double together = wasted[held] + waste + rate * static_cast<double>(held + size - next);
      if (together <= most_before_end && together < wasted[next]) {
        wasted[next] = together;
        added[next] = next - held;
      }
    }
  }
  double least = kNever;
  std::int64_t before = 0;
  for (std::int64_t held = 1; held < total; ++held) {
    const double together =
        wasted[held] + last.cost(total - held) - rate * static_cast<double>(total - held);
    if (together < least) {
      least = together;
      before = held;
    }
  }
  if (before == 0) {
    throw std::invalid_argument("cheapest_cover: no parts of finite cost add up to the total");
  }
  std::vector<std::int64_t> found;
  for (std::int64_t held = before; held > 0; held -= added[held]) {
    found.push_back(added[held]);
  }
  std::swap(found.front(), found.back());  // the first part
  found.insert(found.end(), repeated, period);
  std::sort(found.begin() + 1, found.end());
  double seconds = first.cost(found.front()) + last.cost(total - before);
  for (std::size_t place = 1; place < found.size(); ++place) {
    seconds += usual.cost(found[place]);
  }
  found.push_back(total - before);
  return {seconds, found};
}

std::pair<std::vector<double>, std::vector<std::int64_t>> largest_sum(
    const std::vector<std::vector<double>>& values, std::int64_t total) {
  if (total < 0) {
    throw std::invalid_argument("largest_sum: total must be at least 0, got " +
                                std::to_string(total));
  }
  std::vector<double> best(total + 1, -kNever);
  best[0] = 0.0;
  std::vector<std::vector<std::int64_t>> chosen;
  for (const auto& own : values) {
    std::vector<double> next(total + 1, -kNever);
    std::vector<std::int64_t> choice(total + 1, 0);
    for (std::int64_t sum = 0; sum <= total; ++sum) {
      for (std::int64_t part = 0; part < static_cast<std::int64_t>(own.size()) && part <= sum;
           ++part) {
        const double value = best[sum - part] + own[part];
        if (value > next[sum]) {
          next[sum] = value;
          choice[sum] = part;
        }
      }
    }
    best = std::move(next);
    chosen.push_back(std::move(choice));
  }
  std::vector<std::int64_t> parts(values.size(), 0);
  for (std::size_t at = values.size(), left = total; at-- > 0; left -= parts[at]) {
    parts[at] = chosen[at][left];
  }
  return {best, parts};
}

}  // namespace poplar

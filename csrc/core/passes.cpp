#include "passes.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace poplar {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-12;

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

// Parts that waste at most `most_waste`, in the order of their waste. A part of size m costs at
// least m times the best rate; the cost beyond that is its waste.
std::vector<std::pair<double, std::int64_t>> economical(const std::vector<std::int64_t>& sizes,
                                                        const std::vector<double>& costs,
                                                        double rate, double most_waste) {
  std::vector<std::pair<double, std::int64_t>> found;
  for (std::size_t part = 0; part < sizes.size(); ++part) {
    const double waste = costs[part] - rate * static_cast<double>(sizes[part]);
    if (waste <= most_waste) {
      found.emplace_back(waste, sizes[part]);
    }
  }
  std::sort(found.begin(), found.end());
  return found;
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
  std::vector<double> rest{0.0};  // divisions without a larger first pass
  for (std::int64_t samples = 1; samples <= most; ++samples) {
    double least = kNever;
    std::int64_t chosen = 0;
    const std::int64_t smallest = samples > enough ? period : 1;
    for (std::int64_t size = samples > enough ? period : std::min(cap, samples); size >= smallest;
         --size) {
      const double end = passes[size] + rest[samples - size];
      if (end < least) {
        least = end;
        chosen = size;
      }
    }
    rest.push_back(least);
    table.last.push_back(chosen);
    std::int64_t first = 0;
    for (std::int64_t size = std::min(largest, samples); size > cap; --size) {
      const double end = passes[size] + rest[samples - size];
      if (end < least) {
        least = end;
        first = size;
      }
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
  const auto some = economical(sizes, costs, rate, kNever);
  for (std::int64_t held = 1; held < total - 1; ++held) {
    if (wasted[held] > most_waste) {
      continue;
    }
    for (const auto& [waste, size] : some) {
      if (wasted[held] + waste > most_waste) {
        break;
      }
      // A part that is not full leaves one for the last part: more would make that one costlier.
      const std::int64_t next = std::min(held + size, total - 1);
      const double together = wasted[held] + waste + rate * static_cast<double>(held + size - next);
      if (together <= most_waste && together < wasted[next]) {
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

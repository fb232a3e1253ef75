#include "passes.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace poplar {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-12;

// The parts of a cover: each holds up to `sizes[i]` and costs `costs[i]` or `expensive[i]`.
struct Parts {
  const std::vector<std::int64_t>& sizes;
  const std::vector<double>& costs;
  const std::vector<double>& expensive;

  // The smallest part that holds this many.
  std::size_t holding(std::int64_t many) const {
    return std::lower_bound(sizes.begin(), sizes.end(), many) - sizes.begin();
  }

  // The cost of `many` parts of `size` and `others` parts of `other`, where one part is expensive.
  double cost(std::int64_t size, std::int64_t many, std::int64_t other, std::int64_t others) const {
    double sum = 0.0;
    double more = kNever;
    for (const auto& [held, count] : {std::pair(size, many), std::pair(other, others)}) {
      if (held > 0 && count > 0) {
        const std::size_t part = holding(held);
        sum += static_cast<double>(count) * costs[part];
        more = std::min(more, expensive[part] - costs[part]);
      }
    }
    return sum + more;
  }
};

// The cheapest cover by parts that differ by at most 1, or by equal parts and one for the rest.
double cheapest_even_cover(const Parts& parts, std::int64_t total) {
  double cheapest = kNever;
  for (const std::int64_t size : parts.sizes) {
    const std::int64_t many = total / size;
    const std::int64_t rest = total % size;
    const std::int64_t count = many + (rest > 0 ? 1 : 0);
    const std::int64_t even = total / count;
    const std::int64_t larger = total % count;
    cheapest = std::min({cheapest, parts.cost(size, many, rest, 1),
                         parts.cost(even + 1, larger, even, count - larger)});
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

std::pair<std::vector<double>, std::vector<std::int64_t>> cheapest_passes(
    const std::vector<double>& passes, std::int64_t most) {
  std::vector<double> seconds{0.0};
  std::vector<std::int64_t> last{0};
  const auto largest = static_cast<std::int64_t>(passes.size()) - 1;
  if (largest < 1) {
    return {seconds, last};
  }
  seconds.reserve(most + 1);
  last.reserve(most + 1);
  for (std::int64_t samples = 1; samples <= most; ++samples) {
    double least = kNever;
    std::int64_t chosen = 0;
    for (std::int64_t size = std::min(largest, samples); size > 0; --size) {
      const double end = passes[size] + seconds[samples - size];
      if (end < least) {
        least = end;
        chosen = size;
      }
    }
    seconds.push_back(least);
    last.push_back(chosen);
  }
  return {seconds, last};
}

std::pair<double, std::vector<std::int64_t>> cheapest_cover(const std::vector<std::int64_t>& sizes,
                                                            const std::vector<double>& costs,
                                                            const std::vector<double>& expensive,
                                                            std::int64_t total) {
  if (sizes.empty() || costs.size() != sizes.size() || expensive.size() != sizes.size() ||
      sizes.front() < 1 || total < 1) {
    throw std::invalid_argument(
        "cheapest_cover needs sizes of at least 1, two costs for each, and a total of at least 1");
  }
  const Parts parts{sizes, costs, expensive};
  double rate = kNever;
  for (std::size_t part = 0; part < sizes.size(); ++part) {
    rate = std::min(rate, costs[part] / static_cast<double>(sizes[part]));
  }
  // A cover with more waste than a known one is not the cheapest. So the dynamic program only has
  // to consider few parts and few partial sums.
  const double known = cheapest_even_cover(parts, total);
  const double most_waste = known - rate * static_cast<double>(total) + kRounding * known;
  std::vector<double> wasted(total + 1, kNever);
  std::vector<std::int64_t> added(total + 1, 0);
  const auto add_one_of = [&](const std::vector<std::pair<double, std::int64_t>>& some,
                              std::int64_t held, double before) {
    for (const auto& [waste, full] : some) {
      double together = before + waste;
      if (together > most_waste) {
        return;
      }
      const std::int64_t size = std::min(full, total - held);
      together += rate * static_cast<double>(full - size);
      if (together < wasted[held + size]) {
        wasted[held + size] = together;
        added[held + size] = size;
      }
    }
  };
  add_one_of(economical(sizes, expensive, rate, most_waste), 0, 0.0);
  const auto usual = economical(sizes, costs, rate, most_waste);
  for (std::int64_t held = 1; held < total; ++held) {
    if (wasted[held] <= most_waste) {
      add_one_of(usual, held, wasted[held]);
    }
  }
  std::vector<std::int64_t> found;
  for (std::int64_t held = total; held > 0; held -= added[held]) {
    if (added[held] == 0) {
      throw std::invalid_argument("cheapest_cover: no parts of finite cost add up to the total");
    }
    found.push_back(added[held]);
  }
  std::sort(found.begin(), found.end() - 1);  // the last is the expensive part
  double seconds = expensive[parts.holding(found.back())];
  for (std::size_t place = 0; place + 1 < found.size(); ++place) {
    seconds += costs[parts.holding(found[place])];
  }
  return {seconds, found};
}

}  // namespace poplar

#include "passes.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace poplar {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

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

std::vector<std::int64_t> least_waste(const std::vector<double>& wastes,
                                      const std::vector<std::int64_t>& sizes,
                                      const std::vector<double>& last_wastes,
                                      const std::vector<std::int64_t>& last_sizes, double rate,
                                      double most_waste, std::int64_t total) {
  if (wastes.size() != sizes.size() || last_wastes.size() != last_sizes.size() || total < 1) {
    throw std::invalid_argument("least_waste: a waste for each size, and a total of 1 or more");
  }
  std::vector<double> wasted(total + 1, kNever);
  std::vector<std::int64_t> added(total + 1, 0);
  const auto add_parts = [&](std::int64_t held, double before,
                             const std::vector<double>& part_wastes,
                             const std::vector<std::int64_t>& part_sizes) {
    for (std::size_t part = 0; part < part_sizes.size(); ++part) {
      double together = before + part_wastes[part];
      if (together > most_waste) {
        return;
      }
      const std::int64_t size = std::min(part_sizes[part], total - held);
      together += rate * static_cast<double>(part_sizes[part] - size);
      if (together < wasted[held + size]) {
        wasted[held + size] = together;
        added[held + size] = size;
      }
    }
  };
  add_parts(0, 0.0, last_wastes, last_sizes);
  for (std::int64_t held = 1; held < total; ++held) {
    if (wasted[held] <= most_waste) {
      add_parts(held, wasted[held], wastes, sizes);
    }
  }
  std::vector<std::int64_t> found;
  for (std::int64_t held = total; held > 0; held -= added[held]) {
    if (added[held] == 0) {
      throw std::invalid_argument("least_waste: nothing within most_waste holds the total");
    }
    found.push_back(added[held]);
  }
  std::reverse(found.begin(), found.end());
  return found;
}

}  // namespace poplar

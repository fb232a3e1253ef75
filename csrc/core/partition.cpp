#include "partition.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>

namespace poplar {
namespace {

__extension__ using Wide = unsigned __int128;

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  text.precision(17);
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// Weights as integers, the largest just under 2^62. A double has 53 bits, so weights down to 1/512
// of the largest keep all of them, and so do integers. Smaller weights are rounded at 2^-62 of the
// largest.
std::vector<std::uint64_t> fixed_point(const std::vector<double>& weights) {
  double largest = 0.0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0.0) {
      refuse("weights must be finite and not negative, got ", weights[i], " at index ", i);
    }
    largest = std::max(largest, weights[i]);
  }
  if (largest == 0.0) {
    refuse("at least one of the ", weights.size(), " weights must be above 0");
  }
  int exponent = 0;
  std::frexp(largest, &exponent);
  std::vector<std::uint64_t> scaled(weights.size());
  std::transform(weights.begin(), weights.end(), scaled.begin(), [exponent](double weight) {
    return static_cast<std::uint64_t>(std::nearbyint(std::ldexp(weight, 62 - exponent)));
  });
  return scaled;
}

void check_boundaries(const std::vector<std::int64_t>& boundaries, const char* name) {
  if (boundaries.size() < 2 || boundaries.front() != 0) {
    refuse(name, " must be the offsets of at least one slice, the first 0; got ", boundaries.size(),
           " of them", boundaries.empty() ? "" : ", the first ",
           boundaries.empty() ? std::string() : std::to_string(boundaries.front()));
  }
  for (std::size_t i = 1; i < boundaries.size(); ++i) {
    if (boundaries[i] < boundaries[i - 1]) {
      refuse(name, " must ascend, but ", boundaries[i], " at index ", i, " follows ",
             boundaries[i - 1]);
    }
  }
}

}  // namespace

std::vector<std::int64_t> apportion(std::int64_t total, const std::vector<double>& weights) {
  if (total < 0) {
    refuse("total must not be negative, got ", total);
  }
  const std::vector<std::uint64_t> scaled = fixed_point(weights);
  const Wide sum = std::accumulate(scaled.begin(), scaled.end(), Wide{0});

  std::vector<std::int64_t> parts(scaled.size());
  std::vector<Wide> remainders(scaled.size());
  std::int64_t left = total;
  for (std::size_t i = 0; i < scaled.size(); ++i) {
    const Wide product = Wide{scaled[i]} * static_cast<std::uint64_t>(total);
    parts[i] = static_cast<std::int64_t>(product / sum);
    remainders[i] = product % sum;
    left -= parts[i];
  }
  // The remainders add up to left * sum and each is below sum, so `left` is below the number of
  // parts with a remainder: a weight of 0 never gets anything.
  std::vector<std::size_t> order(scaled.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::partial_sort(order.begin(), order.begin() + left, order.end(),
                    [&remainders](std::size_t a, std::size_t b) {
                      return remainders[a] != remainders[b] ? remainders[a] > remainders[b] : a < b;
                    });
  for (std::int64_t i = 0; i < left; ++i) {
    ++parts[order[static_cast<std::size_t>(i)]];
  }
  return parts;
}

std::vector<std::int64_t> shard_boundaries(std::int64_t numel, const std::vector<double>& shares,
                                           std::int64_t alignment) {
  if (alignment < 1) {
    refuse("alignment must be at least 1, got ", alignment);
  }
  if (numel < 0 || numel % alignment != 0) {
    refuse("numel must be a multiple of the alignment, ", alignment, ", got ", numel,
           "; pad the end of the buffer");
  }
  double sum = 0.0;
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    if (!std::isfinite(shares[rank]) || shares[rank] < 0.0) {
      refuse("shares must be finite and not negative, got ", shares[rank], " for rank ", rank);
    }
    sum += shares[rank];
  }
  if (std::abs(sum - 1.0) > 1e-6) {
    refuse("shares must sum to 1, got ", shares.size(), " that sum to ", sum,
           "; divide each by their sum");
  }
  const std::vector<std::int64_t> parts = apportion(numel / alignment, shares);
  std::vector<std::int64_t> boundaries(shares.size() + 1, 0);
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    boundaries[rank + 1] = boundaries[rank] + parts[rank] * alignment;
  }
  return boundaries;
}

std::vector<Transfer> transfers(const std::vector<std::int64_t>& before,
                                const std::vector<std::int64_t>& after) {
  check_boundaries(before, "old");
  check_boundaries(after, "new");
  if (before.back() != after.back()) {
    refuse("both layouts must cut the same buffer, got ", before.back(), " elements and ",
           after.back());
  }
  std::vector<Transfer> result;
  result.reserve(before.size() + after.size());
  std::size_t source = 0;
  std::size_t target = 0;
  for (std::int64_t position = 0; position < before.back();) {
    while (before[source + 1] <= position) {
      ++source;
    }
    while (after[target + 1] <= position) {
      ++target;
    }
    const std::int64_t stop = std::min(before[source + 1], after[target + 1]);
    result.emplace_back(static_cast<std::int64_t>(source), static_cast<std::int64_t>(target),
                        position, stop);
    position = stop;
  }
  return result;
}

}  // namespace poplar

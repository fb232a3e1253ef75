#include "counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>

namespace poplar {
namespace {

// A few microseconds: longer than a peer needs that is just about to post, much shorter than a time
// slice. Ranks may outnumber cores, and then a spinning rank holds the core that its peer needs.
constexpr int kSpins = 200;

bool has_reached(const std::uint32_t* counter, std::uint32_t value) {
  return static_cast<std::int32_t>(load(counter) - value) >= 0;
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

std::uint32_t load(const std::uint32_t* counter) {
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

void raise(std::uint32_t* counter, std::uint32_t value) {
  __atomic_store_n(counter, value, __ATOMIC_RELEASE);
  syscall(SYS_futex, counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool wait_for(const std::uint32_t* counter, std::uint32_t value, double seconds) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (has_reached(counter, value)) {
      return true;
    }
    relax();
  }
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(std::max(seconds, 0.0));
  while (true) {
    const std::uint32_t seen = load(counter);
    if (static_cast<std::int32_t>(seen - value) >= 0) {
      return true;
    }
    const double left = std::chrono::duration<double>(deadline - Clock::now()).count();
    if (left <= 0) {
      return false;
    }
    timespec timeout;
    timeout.tv_sec = static_cast<time_t>(left);
    timeout.tv_nsec = static_cast<long>((left - static_cast<double>(timeout.tv_sec)) * 1e9);
    // Sleeps only if the counter still is what was seen; may wake for nothing, so it is read again.
    syscall(SYS_futex, counter, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  }
}

}  // namespace poplar

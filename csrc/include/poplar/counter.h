// Counters in memory that several processes share: one raises it, others sleep until it is there.
//
// Always holds: whatever the raiser wrote before is seen by whoever has waited for it. A waiter
// spins for a moment and then sleeps in the kernel, so it leaves its core to the process that it
// waits for; a raiser asks the kernel to wake only if somebody sleeps. Counters wrap around; values
// are compared by their distance, which stays below 2^31. All zeros is a counter at 0.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace poplar {

struct Counter {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;
};
static_assert(sizeof(Counter) == 8 && std::atomic<std::uint32_t>::is_always_lock_free);

// A few microseconds: longer than a peer needs that is just about to raise, much shorter than a
// time slice. Ranks may outnumber cores, and then a spinning rank holds the core that its peer
// needs.
constexpr int kSpins = 200;

inline bool has_reached(const Counter& counter, std::uint32_t value) {
  return static_cast<std::int32_t>(counter.value.load(std::memory_order_acquire) - value) >= 0;
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Wake everybody who sleeps, after the value was changed in sequential order: either the sleeper
// sees the new value before it sleeps, or it is seen here.
inline void wake(Counter& counter) {
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &counter.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

inline void raise(Counter& counter, std::uint32_t value) {
  counter.value.store(value, std::memory_order_seq_cst);
  wake(counter);
}

inline void increase(Counter& counter) {
  counter.value.fetch_add(1, std::memory_order_seq_cst);
  wake(counter);
}

// Wait until the counter has reached `value`; false if it had not after `seconds`.
inline bool wait_for(Counter& counter, std::uint32_t value, double seconds) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (has_reached(counter, value)) {
      return true;
    }
    relax();
  }
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(std::max(seconds, 0.0));
  counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool reached = false;
  while (true) {
    const std::uint32_t seen = counter.value.load(std::memory_order_seq_cst);
    if (static_cast<std::int32_t>(seen - value) >= 0) {
      reached = true;
      break;
    }
    const double left = std::chrono::duration<double>(deadline - Clock::now()).count();
    if (left <= 0) {
      break;
    }
    timespec timeout;
    timeout.tv_sec = static_cast<time_t>(left);
    timeout.tv_nsec = static_cast<long>((left - static_cast<double>(timeout.tv_sec)) * 1e9);
    // Sleeps only if the value still is what was seen; may wake for nothing, so it is read again.
    syscall(SYS_futex, &counter.value, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  }
  counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return reached;
}

}  // namespace poplar

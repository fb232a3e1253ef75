// Counters in shared memory: one process raises a counter, others sleep until it has been reached.
//
// A process that has waited sees everything that was written before the counter was raised. A
// waiter spins briefly and then sleeps on a futex, which leaves its core to the process that it
// waits for. A raise calls the kernel only if a waiter sleeps. Counters wrap around; values are
// compared by their distance, which stays below 2^31. Zeros are a counter at 0.
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

// A few microseconds: longer than a peer needs that is about to raise the counter, much shorter
// than a time slice. Ranks may outnumber cores, and a spinning rank may occupy the core that its
// peer needs.
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

// Wake all sleepers after a sequentially consistent write of the value: either the sleeper sees the
// new value before it sleeps, or this sees the sleeper.
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
    // Sleeps only if the value has not changed. It may wake spuriously, so the value is read again.
    syscall(SYS_futex, &counter.value, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  }
  counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return reached;
}

}  // namespace poplar

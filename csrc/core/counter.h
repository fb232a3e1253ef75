// Counters in memory that several processes share: one raises it, others sleep until it is there.
//
// Always holds: whatever the raiser wrote before `raise` is seen by whoever has waited for it. A
// waiter spins for a moment and then sleeps in the kernel, so it leaves its core to the process
// that it waits for. Counters wrap around; values are compared by their distance, which stays below
// 2^31.
#pragma once

#include <cstdint>

namespace poplar {

// Set the counter and wake everybody who waits for it.
void raise(std::uint32_t* counter, std::uint32_t value);

std::uint32_t load(const std::uint32_t* counter);

// Wait until the counter has reached `value`; false if it had not after `seconds`.
bool wait_for(const std::uint32_t* counter, std::uint32_t value, double seconds);

}  // namespace poplar

// The parts of CUDA that this project's kernels need, on the host, one thread block after another.
//
// A thread is a fiber. A fiber that waits (in a barrier, in a shuffle) yields to the next one, in
// order, so runs are repeatable. Stricter than a GPU: threads that wait for a thread that has
// returned, or that all wait, end the process with a message.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static

struct dim3 {
  unsigned x;
  explicit dim3(unsigned x = 1) : x(x) {}
};

enum cudaError_t { cudaSuccess };
using cudaStream_t = void*;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

inline dim3 threadIdx, blockIdx;

namespace emulated {

constexpr unsigned kWarp = 32;
constexpr std::size_t kStack = 128 << 10;

// Threads of a block that synchronize with each other.
struct Barrier {
  unsigned arrived = 0;
  unsigned generation = 0;
};

struct Block {
  std::vector<ucontext_t> threads;
  std::vector<bool> over;
  std::vector<std::uint64_t> shown;
  std::vector<Barrier> warps;
  Barrier whole;
  std::function<void()> kernel;
  ucontext_t scheduler;
  bool moved = false;
};

inline Block* block;
inline std::vector<std::unique_ptr<char[]>> stacks;  // of the threads, kept for the next block

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "emulated CUDA: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, why);
  std::abort();
}

inline void wait(Barrier& barrier, unsigned first, unsigned count) {
  for (unsigned thread = first; thread < first + count; ++thread) {
    if (block->over[thread]) {
      fail("waits for a thread that has returned");
    }
  }
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    block->moved = true;
  }
  while (barrier.generation == generation) {
    const unsigned me = threadIdx.x;
    swapcontext(&block->threads[me], &block->scheduler);
  }
}

inline void run_thread() {
  block->kernel();
  block->over[threadIdx.x] = true;
  block->moved = true;
}

inline void run_block(unsigned threads, std::function<void()> kernel) {
  Block here;
  here.threads.resize(threads);
  here.over.assign(threads, false);
  here.shown.resize(threads);
  here.warps.resize((threads + kWarp - 1) / kWarp);
  here.kernel = std::move(kernel);
  block = &here;
  while (stacks.size() < threads) {
    stacks.emplace_back(new char[kStack]);
  }
  for (unsigned number = 0; number < threads; ++number) {
    ucontext_t& thread = here.threads[number];
    getcontext(&thread);
    thread.uc_stack.ss_sp = stacks[number].get();
    thread.uc_stack.ss_size = kStack;
    thread.uc_link = &here.scheduler;
    makecontext(&thread, run_thread, 0);
  }
  for (unsigned left = threads; left > 0;) {
    here.moved = false;
    left = 0;
    for (unsigned thread = 0; thread < threads; ++thread) {
      if (!here.over[thread]) {
        threadIdx = dim3(thread);
        swapcontext(&here.scheduler, &here.threads[thread]);
        left += !here.over[thread];
      }
    }
    if (!here.moved) {
      fail("all threads wait");
    }
  }
}

}  // namespace emulated

inline void __syncthreads() {
  emulated::wait(emulated::block->whole, 0, static_cast<unsigned>(emulated::block->threads.size()));
}

template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, int distance) {
  using namespace emulated;
  static_assert(sizeof(Value) <= sizeof(block->shown[0]));
  if (mask != 0xffffffffu) {
    fail("only whole warps are emulated");
  }
  const unsigned me = threadIdx.x;
  Barrier& warp = block->warps[me / kWarp];
  const unsigned first = me / kWarp * kWarp;
  std::memcpy(&block->shown[me], &value, sizeof value);
  wait(warp, first, kWarp);
  Value other;
  std::memcpy(&other, &block->shown[me ^ static_cast<unsigned>(distance)], sizeof other);
  wait(warp, first, kWarp);
  return other;
}

inline unsigned long long atomicAdd(unsigned long long* total, unsigned long long value) {
  const unsigned long long before = *total;
  *total += value;
  return before;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  for (unsigned number = 0; number < config->gridDim.x; ++number) {
    blockIdx = dim3(number);
    emulated::run_block(config->blockDim.x, [&] { kernel(arguments...); });
  }
  return cudaSuccess;
}

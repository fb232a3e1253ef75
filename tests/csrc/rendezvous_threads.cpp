// The rendezvous with ranks as threads, for ThreadSanitizer, which cannot check across processes.
//
// Every rank writes its buffer, posts it, and takes part in reductions with work sharing, in
// gathers, and in sums that are written into all ranks' buffers. All results are checked. Usage:
// rendezvous_threads RANKS COLLECTIVES
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../../csrc/core/rendezvous.h"

namespace {

using poplar::Event;
using poplar::Rendezvous;

// Elements of a slice; each represents a chunk. Several buffers, so that one is read while
// the next is written.
constexpr std::int64_t kSlice = 5;
constexpr std::int64_t kBuffers = 3;
constexpr double kSeconds = 60.0;

struct Segment {
  poplar::Page page;
  std::vector<std::int64_t> buffers[kBuffers];
};

void require(bool holds, const char* what, int rank, std::int64_t collective) {
  if (!holds) {
    std::fprintf(stderr, "rank %d, collective %lld: %s\n", rank, static_cast<long long>(collective),
                 what);
    std::abort();
  }
}

class Rank {
 public:
  Rank(std::vector<Segment>& segments, int rank)
      : segments_(segments),
        size_(static_cast<int>(segments.size())),
        rank_(rank),
        rendezvous_(pages(segments), rank) {}

  void run(std::int64_t collectives) {
    for (std::int64_t c = 0; c < collectives; ++c) {
      if (c >= kBuffers) {
        wait(Event::kFinished, c - kBuffers);
      }
      for (std::int64_t i = 0; i < size_ * kSlice; ++i) {
        buffer(rank_, c)[i] = value(rank_, c, i);
      }
      const bool shares_work = c % 3 == 0;
      rendezvous_.post(c % kBuffers, size_ * kSlice * 8, shares_work);
      wait(Event::kPosted, c);
      if (shares_work) {
        reduce_scatter(c);
      } else if (c % 3 == 1) {
        all_gather(c);
      } else {
        all_reduce(c);
      }
      rendezvous_.finish(c);
    }
  }

 private:
  static std::vector<void*> pages(std::vector<Segment>& segments) {
    std::vector<void*> pages;
    for (Segment& segment : segments) {
      pages.push_back(&segment.page);
    }
    return pages;
  }

  static std::int64_t value(int rank, std::int64_t c, std::int64_t i) {
    return 1000 * c + 100 * rank + i;
  }

  std::int64_t total(std::int64_t c, std::int64_t i) const {
    std::int64_t sum = 0;
    for (int rank = 0; rank < size_; ++rank) {
      sum += value(rank, c, i);
    }
    return sum;
  }

  std::vector<std::int64_t>& buffer(int rank, std::int64_t c) {
    return segments_[rank].buffers[c % kBuffers];
  }

  void wait(Event event, std::int64_t c) {
    require(rendezvous_.wait(event, c, kSeconds).empty(), "a rank is missing", rank_, c);
  }

  void reduce_scatter(std::int64_t c) {
    reduce_chunks(rank_, c);
    for (int step = 1; step < size_; ++step) {
      reduce_chunks((rank_ + step) % size_, c);
    }
    poplar::Counter& done = rendezvous_.slot_of(rank_, c).work_counters.done;
    require(poplar::wait_for(done, kSlice, kSeconds), "the slice is not done", rank_, c);
    for (std::int64_t i = rank_ * kSlice; i < (rank_ + 1) * kSlice; ++i) {
      require(buffer(rank_, c)[i] == total(c, i), "wrong sum", rank_, c);
    }
  }

  void reduce_chunks(int owner, std::int64_t c) {
    poplar::WorkCounters& work_counters = rendezvous_.slot_of(owner, c).work_counters;
    const auto add = [&](std::int64_t begin, std::int64_t) {
      const std::int64_t i = owner * kSlice + begin / poplar::kChunk;
      std::int64_t sum = 0;
      for (int rank = 0; rank < size_; ++rank) {
        sum += buffer(rank, c)[i];
      }
      buffer(owner, c)[i] = sum;
    };
    while (poplar::work_on_next(work_counters, kSlice * poplar::kChunk, add)) {
    }
  }

  void all_gather(std::int64_t c) {
    for (int rank = 0; rank < size_; ++rank) {
      for (std::int64_t i = 0; i < size_ * kSlice; ++i) {
        require(buffer(rank, c)[i] == value(rank, c, i), "wrong part", rank_, c);
      }
    }
  }

  void all_reduce(std::int64_t c) {
    wait(Event::kFinished, c - 1);
    for (std::int64_t i = rank_ * kSlice; i < (rank_ + 1) * kSlice; ++i) {
      for (int rank = 0; rank < size_; ++rank) {
        buffer(rank, c)[i] = total(c, i);
      }
    }
    rendezvous_.mark_written(c);
    wait(Event::kWritten, c);
    for (std::int64_t i = 0; i < size_ * kSlice; ++i) {
      require(buffer(rank_, c)[i] == total(c, i), "wrong total", rank_, c);
    }
  }

  std::vector<Segment>& segments_;
  int size_;
  int rank_;
  Rendezvous rendezvous_;
};

}  // namespace

int main(int, char** arguments) {
  const int size = std::atoi(arguments[1]);
  const std::int64_t collectives = std::atoll(arguments[2]);
  std::vector<Segment> segments(size);
  for (Segment& segment : segments) {
    for (auto& buffer : segment.buffers) {
      buffer.resize(size * kSlice);
    }
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&segments, rank, collectives] { Rank(segments, rank).run(collectives); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::puts("done");
}

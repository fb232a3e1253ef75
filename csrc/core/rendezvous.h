// Counters at the start of each rank's shared memory: what it has posted and how far it has read.
//
// Ranks of one host issue the same collectives in the same order. Each posts its data, reads the
// others' and marks the collective finished, so that the memory can be reused. No messages are
// sent. This class knows neither tensors nor deadlines; `poplar/comm/host_memory/` does.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "poplar/counter.h"
#include "poplar/work_sharing.h"

namespace poplar {

// The maximum number of collectives in flight.
constexpr std::int64_t kSlots = 192;

// What a rank has posted for one collective.
struct alignas(64) Slot {
  std::int64_t begin;
  std::int64_t nbytes;
  // Raised when the rank has written all it had to write into the others' data.
  Counter written;
  // For the chunks of the rank's own slice, if others may reduce some of them.
  WorkCounters work_counters;
  std::uint32_t shares_work;
};

struct Page {
  alignas(64) Counter posted;
  alignas(64) Counter finished;
  Slot slots[kSlots];
};
static_assert(sizeof(Page) == 128 + 64 * kSlots);

enum class Event { kPosted, kWritten, kFinished };

class Rendezvous {
 public:
  // `memories`: of each rank, in rank order, each at least `sizeof(Page)` bytes, zero at first.
  // They must outlive this object.
  Rendezvous(const std::vector<void*>& memories, int rank);

  // Post the data at byte `begin` of this rank's memory; returns the collective's number. All ranks
  // must have finished the collective `kSlots` before. A rank that waits for this post sees all
  // earlier writes to shared memory. `shares_work`: others may reduce chunks of this rank's slice.
  std::int64_t post(std::int64_t begin, std::int64_t nbytes, bool shares_work);

  // The number of collectives that this rank has posted, which is the number of the next one.
  std::int64_t posted() const { return posted_; }

  // What a rank has posted for a collective that it has posted.
  Slot& slot_of(int rank, std::int64_t collective);

  // Signal that this rank has written all it had to write into the others' data.
  void mark_written(std::int64_t collective);

  // Signal that this rank no longer reads what others posted; in any order.
  void finish(std::int64_t collective);

  // Whether all other ranks have finished it.
  bool is_over(std::int64_t collective) const;

  // Wait for the event on all other ranks, for at most `seconds`; returns the missing ranks,
  // ascending, and none as soon as all are there.
  std::vector<int> wait(Event event, std::int64_t collective, double seconds);

 private:
  Counter& counter_of(int rank, Event event, std::int64_t collective);

  std::vector<Page*> pages_;
  int rank_;
  std::int64_t posted_ = 0;
  std::int64_t finished_ = 0;
  // Finished collectives after one that is not finished yet.
  std::set<std::int64_t> ahead_;
};

}  // namespace poplar

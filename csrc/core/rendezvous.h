// A rendezvous per rank at the start of its shared memory: where what it offers lies, how far it
// is.
//
// Ranks of one host that take part in the same collectives in the same order each post their part,
// read the others', and say when they are done, so that the memory can be written again. Nothing is
// sent and nobody is asked. Knows neither tensors nor deadlines: `poplar/comm/rendezvous.py` does.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "poplar/claims.h"
#include "poplar/counter.h"

namespace poplar {

// Collectives in flight at most.
constexpr std::int64_t kPlaces = 192;

// What a rank has posted for one collective.
struct alignas(64) Place {
  std::int64_t begin;
  std::int64_t nbytes;
  // Set once the rank has written into the others' parts what it had to.
  Counter mark;
  // Chunks of the rank's own slice, if others may work on it.
  Claims claims;
  std::uint32_t is_open;
};

struct Page {
  alignas(64) Counter posted;
  alignas(64) Counter finished;
  Place places[kPlaces];
};
static_assert(sizeof(Page) == 128 + 64 * kPlaces);

enum class Event { kPosted, kMarked, kFinished };

class Rendezvous {
 public:
  // `memories`: of each rank, in rank order, each at least `sizeof(Page)`, all zeros at first; kept
  // by the caller.
  Rendezvous(const std::vector<void*>& memories, int rank);

  // Offer what lies `begin` bytes into this rank's memory; returns the collective's number. All
  // ranks must have finished the collective `kPlaces` before.
  std::int64_t post(std::int64_t begin, std::int64_t nbytes, bool is_open);

  std::int64_t posted() const { return posted_; }

  // What a rank has posted for a collective that it has posted.
  const Place& place_of(int rank, std::int64_t collective) const;
  Place& place_of(int rank, std::int64_t collective);

  // This rank has written into others' parts.
  void mark(std::int64_t collective);

  // This rank reads nothing any more of what others posted; in any order.
  void finish(std::int64_t collective);

  // Whether all others have finished it.
  bool is_over(std::int64_t collective) const;

  // The other ranks that have not come so far after `seconds`; at once if all have.
  std::vector<int> late(Event event, std::int64_t collective, double seconds);

 private:
  Counter& counter_of(int rank, Event event, std::int64_t collective);

  std::vector<Page*> pages_;
  int rank_;
  std::int64_t posted_ = 0;
  std::int64_t finished_ = 0;
  // Finished, though an earlier one is not yet.
  std::set<std::int64_t> ahead_;
};

}  // namespace poplar

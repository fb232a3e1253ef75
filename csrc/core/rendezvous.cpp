#include "rendezvous.h"

#include <algorithm>
#include <chrono>

namespace poplar {
namespace {

// The value of a counter once it has reached this collective.
std::uint32_t after(std::int64_t collective) { return static_cast<std::uint32_t>(collective + 1); }

}  // namespace

Rendezvous::Rendezvous(const std::vector<void*>& memories, int rank) : rank_(rank) {
  for (void* memory : memories) {
    pages_.push_back(static_cast<Page*>(memory));
  }
}

std::int64_t Rendezvous::post(std::int64_t begin, std::int64_t nbytes, bool shares_work) {
  const std::int64_t collective = posted_;
  Slot& slot = slot_of(rank_, collective);
  slot.begin = begin;
  slot.nbytes = nbytes;
  slot.shares_work = shares_work;
  slot.work_counters.started.store(0, std::memory_order_relaxed);
  slot.work_counters.done.value.store(0, std::memory_order_relaxed);
  // The number of the collective; one more once it is written.
  slot.written.value.store(static_cast<std::uint32_t>(collective), std::memory_order_relaxed);
  posted_ = collective + 1;
  raise(pages_[rank_]->posted, after(collective));
  return collective;
}

Slot& Rendezvous::slot_of(int rank, std::int64_t collective) {
  return pages_[rank]->slots[collective % kSlots];
}

void Rendezvous::mark_written(std::int64_t collective) {
  raise(slot_of(rank_, collective).written, after(collective));
}

void Rendezvous::finish(std::int64_t collective) {
  ahead_.insert(collective);
  const std::int64_t before = finished_;
  while (!ahead_.empty() && *ahead_.begin() == finished_) {
    ahead_.erase(ahead_.begin());
    ++finished_;
  }
  if (finished_ != before) {
    raise(pages_[rank_]->finished, static_cast<std::uint32_t>(finished_));
  }
}

bool Rendezvous::is_over(std::int64_t collective) const {
  for (std::size_t peer = 0; peer < pages_.size(); ++peer) {
    if (static_cast<int>(peer) != rank_ &&
        !has_reached(pages_[peer]->finished, after(collective))) {
      return false;
    }
  }
  return true;
}

std::vector<int> Rendezvous::wait(Event event, std::int64_t collective, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  const int size = static_cast<int>(pages_.size());
  std::vector<int> missing;
  for (int step = 1; step < size; ++step) {
    const int peer = (rank_ + step) % size;
    const double left = std::chrono::duration<double>(deadline - Clock::now()).count();
    if (!wait_for(counter_of(peer, event, collective), after(collective), left)) {
      missing.push_back(peer);
    }
  }
  std::sort(missing.begin(), missing.end());
  return missing;
}

Counter& Rendezvous::counter_of(int rank, Event event, std::int64_t collective) {
  switch (event) {
    case Event::kPosted:
      return pages_[rank]->posted;
    case Event::kFinished:
      return pages_[rank]->finished;
    default:
      return slot_of(rank, collective).written;
  }
}

}  // namespace poplar

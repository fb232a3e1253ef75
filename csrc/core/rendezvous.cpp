#include "rendezvous.h"

#include <algorithm>
#include <chrono>

namespace poplar {
namespace {

// What a counter is at once collective number `collective` has come so far.
std::uint32_t after(std::int64_t collective) { return static_cast<std::uint32_t>(collective + 1); }

}  // namespace

Rendezvous::Rendezvous(const std::vector<void*>& memories, int rank) : rank_(rank) {
  for (void* memory : memories) {
    pages_.push_back(static_cast<Page*>(memory));
  }
}

std::int64_t Rendezvous::post(std::int64_t begin, std::int64_t nbytes, bool is_open) {
  const std::int64_t collective = posted_;
  Place& place = place_of(rank_, collective);
  place.begin = begin;
  place.nbytes = nbytes;
  place.is_open = is_open;
  place.claims.claimed.store(0, std::memory_order_relaxed);
  place.claims.done.value.store(0, std::memory_order_relaxed);
  // Not yet: the number of the collective, and one more once it is set.
  place.mark.value.store(static_cast<std::uint32_t>(collective), std::memory_order_relaxed);
  posted_ = collective + 1;
  raise(pages_[rank_]->posted, after(collective));
  return collective;
}

const Place& Rendezvous::place_of(int rank, std::int64_t collective) const {
  return pages_[rank]->places[collective % kPlaces];
}

Place& Rendezvous::place_of(int rank, std::int64_t collective) {
  return pages_[rank]->places[collective % kPlaces];
}

void Rendezvous::mark(std::int64_t collective) {
  raise(place_of(rank_, collective).mark, after(collective));
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

std::vector<int> Rendezvous::late(Event event, std::int64_t collective, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  const int size = static_cast<int>(pages_.size());
  std::vector<int> late;
  for (int step = 1; step < size; ++step) {
    const int peer = (rank_ + step) % size;
    const double left = std::chrono::duration<double>(deadline - Clock::now()).count();
    if (!wait_for(counter_of(peer, event, collective), after(collective), left)) {
      late.push_back(peer);
    }
  }
  std::sort(late.begin(), late.end());
  return late;
}

Counter& Rendezvous::counter_of(int rank, Event event, std::int64_t collective) {
  switch (event) {
    case Event::kPosted:
      return pages_[rank]->posted;
    case Event::kFinished:
      return pages_[rank]->finished;
    default:
      return place_of(rank, collective).mark;
  }
}

}  // namespace poplar

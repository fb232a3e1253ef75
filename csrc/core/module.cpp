// poplar._core: the Python face of partition.h and rendezvous.h. Free of torch, so it builds and is
// tested anywhere.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "partition.h"
#include "passes.h"
#include "rendezvous.h"
#include "simplex.h"

namespace py = pybind11;

namespace {

// A rendezvous, and the memory of all ranks (mmaps, say), which it keeps.
class BufferRendezvous {
 public:
  BufferRendezvous(const std::vector<py::buffer>& memories, int rank)
      : memories_(memories), rendezvous_(addresses(memories, rank), rank) {}

  poplar::Rendezvous& rendezvous() { return rendezvous_; }

  const poplar::Place& place_of(int rank, std::int64_t collective) {
    if (rank < 0 || rank >= static_cast<int>(memories_.size()) || collective < 0) {
      throw std::invalid_argument("no place of rank " + std::to_string(rank) + " for collective " +
                                  std::to_string(collective));
    }
    return rendezvous_.place_of(rank, collective);
  }

 private:
  static std::vector<void*> addresses(const std::vector<py::buffer>& memories, int rank) {
    if (rank < 0 || rank >= static_cast<int>(memories.size())) {
      throw std::invalid_argument("rank " + std::to_string(rank) + " of " +
                                  std::to_string(memories.size()));
    }
    std::vector<void*> addresses;
    for (const py::buffer& memory : memories) {
      const py::buffer_info info = memory.request(true);
      const auto bytes = static_cast<std::size_t>(info.size * info.itemsize);
      if (bytes < sizeof(poplar::Page) ||
          reinterpret_cast<std::uintptr_t>(info.ptr) % alignof(poplar::Page) != 0) {
        throw std::invalid_argument("a rendezvous needs " + std::to_string(sizeof(poplar::Page)) +
                                    " bytes at a multiple of 64, got " + std::to_string(bytes));
      }
      addresses.push_back(info.ptr);
    }
    return addresses;
  }

  std::vector<py::buffer> memories_;
  poplar::Rendezvous rendezvous_;
};

void define_rendezvous(py::module_& module) {
  py::enum_<poplar::Event>(module, "Event", "What ranks do with a collective.")
      .value("POSTED", poplar::Event::kPosted)
      .value("MARKED", poplar::Event::kMarked)
      .value("FINISHED", poplar::Event::kFinished);

  module.attr("RENDEZVOUS_BYTES") = sizeof(poplar::Page);
  module.attr("PLACES") = poplar::kPlaces;
  module.attr("CHUNK") = poplar::kChunk;

  py::class_<BufferRendezvous>(module, "Rendezvous",
                               R"(Where ranks of one host say what they offer and how far they are.

A rendezvous per rank, at the start of its shared memory. All ranks post the same collectives in the same
order, which are numbered from 0. Not for several threads at once.)")
      .def(py::init<const std::vector<py::buffer>&, int>(), py::arg("memories"), py::arg("rank"),
           R"(Args:
    memories: of each rank, in rank order: writable buffers (mmaps, say) of which the first
        `RENDEZVOUS_BYTES` are used, all zeros before the first rank begins. They are kept.
    rank: this one.

Raises:
    ValueError: a buffer that is too small or not aligned.)")
      .def_property_readonly(
          "posted", [](BufferRendezvous& self) { return self.rendezvous().posted(); },
          "Collectives that this rank has posted: the number of the next one.")
      .def(
          "post",
          [](BufferRendezvous& self, std::int64_t begin, std::int64_t nbytes, bool is_open) {
            return self.rendezvous().post(begin, nbytes, is_open);
          },
          py::arg("begin"), py::arg("nbytes"), py::arg("is_open"),
          R"(Offer what lies at byte `begin` of this rank's memory; returns the collective's number.

All ranks must have finished the collective `PLACES` before. What was written into shared memory
before is seen by whoever has waited for it. `is_open`: others may work on this rank's slice.)")
      .def(
          "part_of",
          [](BufferRendezvous& self, int rank, std::int64_t collective) {
            const poplar::Place& place = self.place_of(rank, collective);
            return py::make_tuple(place.begin, place.nbytes, place.is_open != 0);
          },
          py::arg("rank"), py::arg("collective"),
          "`(begin, nbytes, is_open)` of what a rank has posted.")
      .def(
          "mark",
          [](BufferRendezvous& self, std::int64_t collective) {
            self.rendezvous().mark(collective);
          },
          py::arg("collective"), "This rank has written into others' parts what it had to.")
      .def(
          "finish",
          [](BufferRendezvous& self, std::int64_t collective) {
            self.rendezvous().finish(collective);
          },
          py::arg("collective"),
          "This rank reads nothing any more of what others posted. In any order.")
      .def(
          "is_over",
          [](BufferRendezvous& self, std::int64_t collective) {
            return self.rendezvous().is_over(collective);
          },
          py::arg("collective"), "Whether all others have finished it.")
      .def(
          "late",
          [](BufferRendezvous& self, poplar::Event event, std::int64_t collective, double seconds) {
            const py::gil_scoped_release others_may_run;
            return self.rendezvous().late(event, collective, seconds);
          },
          py::arg("event"), py::arg("collective"), py::arg("seconds"),
          R"(The other ranks that have not come so far after so many seconds, ascending.

At once, and empty, when all have; sleeps meanwhile.)")
      .def(
          "claims_at",
          [](BufferRendezvous&, std::int64_t collective) {
            return offsetof(poplar::Page, places) + offsetof(poplar::Place, claims) +
                   sizeof(poplar::Place) * (collective % poplar::kPlaces);
          },
          py::arg("collective"),
          "Where in a rank's memory the claims on its slice lie: `CLAIMS_BYTES` from this byte.")
      .def(
          "wait_for_chunks",
          [](BufferRendezvous& self, int rank, std::int64_t collective, std::uint32_t chunks,
             double seconds) {
            self.place_of(rank, collective);
            const py::gil_scoped_release others_may_run;
            poplar::Counter& done = self.rendezvous().place_of(rank, collective).claims.done;
            return poplar::wait_for(done, chunks, seconds);
          },
          py::arg("rank"), py::arg("collective"), py::arg("chunks"), py::arg("seconds"),
          "Whether so many chunks of a rank's slice are done after so many seconds.");
  module.attr("CLAIMS_BYTES") = sizeof(poplar::Claims);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "Partition arithmetic of flat buffers, and rendezvous in shared memory.";

  define_rendezvous(module);

  module.def("shard_boundaries", &poplar::shard_boundaries, py::arg("numel"), py::arg("shares"),
             py::arg("alignment"), R"(Cut a flat buffer into one contiguous, aligned slice per rank.

Args:
    numel: elements in the buffer; its tail is padded to `alignment` by the caller.
    shares: fraction owned by each rank; non-negative, sums to 1. Zero gives an empty slice.
    alignment: every boundary is a multiple of this many elements.

Returns:
    `len(shares) + 1` offsets, first 0, last `numel`; rank `r` owns `[offsets[r], offsets[r + 1])`.

Raises:
    ValueError: shares that are negative, not finite, or do not sum to 1; `numel` that is not a
        multiple of `alignment`.

Largest-remainder rounding, so no slice is off by more than one `alignment`.)");

  module.def("apportion", &poplar::apportion, py::arg("total"), py::arg("weights"),
             R"(Cut `total` into integers in proportion to `weights`, by largest remainder.

Args:
    total: what is divided; not negative.
    weights: finite, not negative, not all 0. A weight of 0 gets 0.

Returns:
    One integer per weight; they sum to `total`, and none is a whole unit off its exact quota.

Raises:
    ValueError: a weight that is negative or not finite, none above 0, or a negative total.

Ties go to the lower index. Exact for integers and for weights within a factor of 512 of each
other; smaller ones are rounded at 2**-62 of the largest.)");

  module.def("cheapest_passes", &poplar::cheapest_passes, py::arg("passes"), py::arg("most"),
             R"(How 0, 1, ... `most` samples are cut into passes in the least time.

Args:
    passes: what a pass of 0, 1, ... samples takes, up to the largest that is allowed.
    most: how many samples there may be.

Returns:
    For each number of samples the least time, and the samples of the last pass. Of equally fast
    cuts the one with the largest last pass. One entry, for no samples, if no pass holds one.)");

  module.def("cheapest_cover", &poplar::cheapest_cover, py::arg("sizes"), py::arg("costs"),
             py::arg("dearest"), py::arg("total"),
             R"(The cheapest parts that hold `total` together, of which one is dearer.

Args:
    sizes: of parts, ascending, at least 1, none above `total`.
    costs: of parts, non-negative and ascending as well; a part that holds less costs no more.
    dearest: of the dearer part, ascending; none below what it costs as one of the others, or the
        result may not be the cheapest: nobody checks it.
    total: at least 1.

Returns:
    The cost, and a sum of `total` in parts: smaller ones first, and then the dearer one.

Raises:
    ValueError: no parts, one below 1, not two costs for each, a total below 1, or none that hold it
        at a finite cost.)");

  module.def(
      "minimise", &poplar::minimise, py::arg("costs"), py::arg("rows"), py::arg("bounds"),
      R"(Minimise `costs . x` over `x >= 0` with `rows . x <= bounds`, by the dual simplex method.

Args:
    costs: of each variable, none negative.
    rows: factors by variable; those that are left out are 0.
    bounds: one per row.

Returns:
    The minimum and the variables there, or None if no `x` satisfies all rows.

Raises:
    RuntimeError: too many pivots.
    ValueError: a row of a variable that has no cost, or not a bound for each row.)");

  module.def("parameter_slices", &poplar::parameter_slices, py::arg("offsets"), py::arg("numels"),
             py::arg("boundaries"), R"(Which rank owns which part of which parameter.

Args:
    offsets: first element of each parameter in the flat buffer, ascending; gaps are allowed.
    numels: elements of each parameter.
    boundaries: the ranks' slices, as `shard_boundaries` returns them.

Returns:
    `(parameter, rank, start in the parameter, length)`, ordered by parameter, then start; empty
    ones are left out.

Raises:
    ValueError: offsets that overlap or don't ascend, a parameter past the end of the buffer,
        boundaries that don't start at 0 or don't ascend.)");

  module.def("transfers", &poplar::transfers, py::arg("old"), py::arg("new"),
             R"(What moves where when the slices of one flat buffer change.

Args:
    old: boundaries of the slices now, as `shard_boundaries` returns them.
    new: boundaries afterwards; may be for another number of ranks.

Returns:
    `(source rank, target rank, start, stop)` in elements of the flat buffer, ascending, together
    all of it; what stays where it is has the same rank twice.

Raises:
    ValueError: boundaries of buffers of different size, or that don't start at 0 and ascend.)");
}

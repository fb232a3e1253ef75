// Python bindings of csrc/core (poplar._core). They need no torch, so they build everywhere.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "buffers.h"
#include "crc32c.h"
#include "partition.h"
#include "passes.h"
#include "rendezvous.h"
#include "simplex.h"

// What the CUDA operators were compiled for: "sm_80,compute_90"; empty if they were not built.
#ifndef POPLAR_CUDA_ARCHITECTURES
#define POPLAR_CUDA_ARCHITECTURES ""
#endif

namespace py = pybind11;

namespace {

// A rendezvous that holds references to the buffers of all ranks (for example mmaps).
class BufferRendezvous {
 public:
  BufferRendezvous(const std::vector<py::buffer>& memories, int rank)
      : memories_(memories), rendezvous_(addresses(memories, rank), rank) {}

  poplar::Rendezvous& rendezvous() { return rendezvous_; }

  const poplar::Slot& slot_of(int rank, std::int64_t collective) {
    if (rank < 0 || rank >= static_cast<int>(memories_.size()) || collective < 0) {
      throw std::invalid_argument("no slot of rank " + std::to_string(rank) + " for collective " +
                                  std::to_string(collective));
    }
    return rendezvous_.slot_of(rank, collective);
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
  py::enum_<poplar::Event>(module, "Event", "The stages of a collective on one rank.")
      .value("POSTED", poplar::Event::kPosted)
      .value("WRITTEN", poplar::Event::kWritten)
      .value("FINISHED", poplar::Event::kFinished);

  module.attr("RENDEZVOUS_BYTES") = sizeof(poplar::Page);
  module.attr("SLOTS") = poplar::kSlots;
  module.attr("CHUNK") = poplar::kChunk;

  py::class_<BufferRendezvous>(module, "Rendezvous",
                               R"(What the ranks of one host have posted and how far they have read.

Its counters are at the start of each rank's shared memory. All ranks post the same collectives, numbered
from 0, in the same order. Not thread-safe.)")
      .def(py::init<const std::vector<py::buffer>&, int>(), py::arg("memories"), py::arg("rank"),
           R"(Args:
    memories: of each rank, in rank order: writable buffers (for example mmaps). The first
        `RENDEZVOUS_BYTES` of each are used, all zero before the first rank starts. The rendezvous
        holds references to them.
    rank: this rank.

Raises:
    ValueError: a buffer that is too small or not aligned.)")
      .def_property_readonly(
          "posted", [](BufferRendezvous& self) { return self.rendezvous().posted(); },
          "The number of collectives that this rank has posted, which is the number of the next "
          "one.")
      .def(
          "post",
          [](BufferRendezvous& self, std::int64_t begin, std::int64_t nbytes, bool shares_work) {
            return self.rendezvous().post(begin, nbytes, shares_work);
          },
          py::arg("begin"), py::arg("nbytes"), py::arg("shares_work"),
          R"(Post the data at byte `begin` of this rank's memory; returns the collective's number.

All ranks must have finished the collective `SLOTS` before. A rank that waits for this post sees all
earlier writes to shared memory. `shares_work`: others may reduce chunks of this rank's slice.)")
      .def(
          "posted_range",
          [](BufferRendezvous& self, int rank, std::int64_t collective) {
            const poplar::Slot& slot = self.slot_of(rank, collective);
            return py::make_tuple(slot.begin, slot.nbytes, slot.shares_work != 0);
          },
          py::arg("rank"), py::arg("collective"),
          "`(begin, nbytes, shares_work)` of what a rank has posted.")
      .def(
          "mark_written",
          [](BufferRendezvous& self, std::int64_t collective) {
            self.rendezvous().mark_written(collective);
          },
          py::arg("collective"),
          "Signal that this rank has written all it had to write into the others' data.")
      .def(
          "finish",
          [](BufferRendezvous& self, std::int64_t collective) {
            self.rendezvous().finish(collective);
          },
          py::arg("collective"),
          "Signal that this rank no longer reads what others posted; in any order.")
      .def(
          "is_over",
          [](BufferRendezvous& self, std::int64_t collective) {
            return self.rendezvous().is_over(collective);
          },
          py::arg("collective"), "Whether all other ranks have finished it.")
      .def(
          "wait",
          [](BufferRendezvous& self, poplar::Event event, std::int64_t collective, double seconds) {
            const py::gil_scoped_release others_may_run;
            return self.rendezvous().wait(event, collective, seconds);
          },
          py::arg("event"), py::arg("collective"), py::arg("seconds"),
          R"(Wait for the event on all other ranks; returns the ranks that are missing after `seconds`.

Ascending. Returns an empty list as soon as all ranks are there. Releases the GIL.)")
      .def(
          "work_counters_offset",
          [](BufferRendezvous&, std::int64_t collective) {
            return offsetof(poplar::Page, slots) + offsetof(poplar::Slot, work_counters) +
                   sizeof(poplar::Slot) * (collective % poplar::kSlots);
          },
          py::arg("collective"),
          "Byte offset in a rank's memory of the `WORK_COUNTERS_BYTES` work-sharing counters of "
          "its slice.")
      .def(
          "wait_for_chunks",
          [](BufferRendezvous& self, int rank, std::int64_t collective, std::uint32_t chunks,
             double seconds) {
            self.slot_of(rank, collective);
            const py::gil_scoped_release others_may_run;
            poplar::Counter& done = self.rendezvous().slot_of(rank, collective).work_counters.done;
            return poplar::wait_for(done, chunks, seconds);
          },
          py::arg("rank"), py::arg("collective"), py::arg("chunks"), py::arg("seconds"),
          "Whether this many chunks of a rank's slice are reduced within `seconds`.");
  module.attr("WORK_COUNTERS_BYTES") = sizeof(poplar::WorkCounters);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "Partitions of flat buffers, pass allocation, linear programs, the shared-memory "
      "rendezvous, and checksums.";

  define_rendezvous(module);
  module.attr("CUDA_ARCHITECTURES") = POPLAR_CUDA_ARCHITECTURES;

  module.def(
      "fail_at_exit",
      [] {
        std::atexit([] {
          std::fflush(nullptr);
          std::_Exit(1);
        });
      },
      R"(Let the exit code of this process be 1, whatever Python has decided.

What Python does at its end is done by then. Python's own `atexit` cannot change the exit code.)");

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
    total: the integer to divide; not negative.
    weights: finite, not negative, not all 0. A weight of 0 gets 0.

Returns:
    One integer per weight; they sum to `total`, and none is a whole unit off its exact quota.

Raises:
    ValueError: a weight that is negative or not finite, none above 0, or a negative total.

Ties go to the lower index. Exact for integers and for weights within a factor of 512 of each
other; smaller ones are rounded at 2**-62 of the largest.)");

  module.def(
      "cheapest_passes",
      [](const std::vector<double>& passes, std::int64_t later, std::int64_t most) {
        auto table = poplar::cheapest_passes(passes, later, most);
        return py::make_tuple(table.seconds, table.first, table.last);
      },
      py::arg("passes"), py::arg("later"), py::arg("most"),
      R"(The fastest division of 0, 1, ... samples into passes.

Args:
    passes: seconds of a pass of 0, 1, ... samples, up to the largest first pass.
    later: the most samples of a pass after the first one; below 1: there is only one pass.
    most: the largest number of samples.

Returns:
    For each number of samples the least seconds, the samples of a first pass that is larger than
    `later` (0: there is none), and the samples of the last pass if there is none. They end where
    more samples fit into no passes. Ties go to the largest last pass.)");

  module.def("cheapest_cover", &poplar::cheapest_cover, py::arg("first_sizes"),
             py::arg("first_costs"), py::arg("sizes"), py::arg("costs"), py::arg("last_costs"),
             py::arg("total"),
             R"(The cheapest two parts or more that add up to `total`.

Args:
    first_sizes: sizes of the first part, ascending, at least 1.
    first_costs: cost of a first part up to each size, non-negative and ascending.
    sizes: sizes of the other parts, ascending, at least 1.
    costs: cost of another part up to each size, non-negative and ascending.
    last_costs: cost of the last part, ascending. Each must be at least the usual cost, or the
        result may not be the cheapest; this is not checked.
    total: at least 2.

Returns:
    The cost, and the sizes of the parts: the first, the others ascending, the last.

Raises:
    ValueError: no parts, a size below 1, not as many costs as sizes, a total below 2, or no parts
        that add up to it at a finite cost.)");

  module.def(
      "largest_sum", &poplar::largest_sum, py::arg("values"), py::arg("total"),
      py::call_guard<py::gil_scoped_release>(),
      R"(The largest sums of `values[i][parts[i]]` over parts that add up to 0, 1, ... `total`.

Args:
    values: for each index the values of a part of 0, 1, ...
    total: not negative. The steps are `total` times the number of all values.

Returns:
    The sums, -infinity where no parts add up to a number, and the parts for `total`.

Raises:
    ValueError: a negative total.

Releases the GIL.)");

  module.def(
      "minimise", &poplar::minimise, py::arg("costs"), py::arg("rows"), py::arg("bounds"),
      R"(Minimize `costs . x` over `x >= 0` with `rows . x <= bounds`, by the dual simplex method.

Args:
    costs: one per variable, none negative.
    rows: factors by variable; missing factors are 0.
    bounds: one per row.

Returns:
    The minimum and its variables, or None if no `x` satisfies all rows.

Raises:
    RuntimeError: too many pivots.
    ValueError: a row with a variable that has no cost, or a different number of bounds.)");

  module.def("parameter_slices", &poplar::parameter_slices, py::arg("offsets"), py::arg("numels"),
             py::arg("boundaries"), R"(Which rank owns which part of which parameter.

Args:
    offsets: first element of each parameter in the flat buffer, ascending; gaps are allowed.
    numels: elements of each parameter.
    boundaries: the ranks' slices, as `shard_boundaries` returns them.

Returns:
    `(parameter, rank, start in the parameter, length)`, ordered by parameter, then start, without
    empty slices.

Raises:
    ValueError: offsets that overlap or don't ascend, a parameter past the end of the buffer,
        boundaries that don't start at 0 or don't ascend.)");

  module.def("transfers", &poplar::transfers, py::arg("old"), py::arg("new"),
             R"(The transfers that change the slices of one flat buffer.

Args:
    old: current boundaries, as `shard_boundaries` returns them.
    new: boundaries afterwards; the number of ranks may differ.

Returns:
    `(source rank, target rank, start, stop)` in elements of the flat buffer, ascending, together
    all of it. Elements that stay on their rank have the same source and target.

Raises:
    ValueError: boundaries of buffers of different size, or that don't start at 0 and ascend.)");

  module.def(
      "crc32c",
      [](const py::buffer& data, std::uint32_t crc, bool portable) {
        const py::buffer_info info = poplar::contiguous(data);
        const std::size_t bytes = poplar::bytes_of(info);
        const py::gil_scoped_release others_may_run;
        return portable ? poplar::crc32c_portable(info.ptr, bytes, crc)
                        : poplar::crc32c(info.ptr, bytes, crc);
      },
      py::arg("data"), py::arg("crc") = 0, py::arg("portable") = false,
      R"(CRC-32C (Castagnoli, RFC 3720) of the bytes of a contiguous buffer.

Args:
    data: any object with the buffer protocol.
    crc: the checksum of the bytes before.
    portable: compute it with tables, not by the processor's instruction. The result is the same.

Releases the GIL.)");
}

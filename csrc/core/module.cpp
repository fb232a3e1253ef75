// Python bindings of csrc/core (poplar._core): the contracts are in its headers. They need no
// torch, so they build everywhere.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

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

// A rendezvous that holds references to the buffers of all ranks: writable, with at least
// `RENDEZVOUS_BYTES` each at a multiple of 64.
class BufferRendezvous : public poplar::Rendezvous {
 public:
  BufferRendezvous(const std::vector<py::buffer>& memories, int rank)
      : Rendezvous(addresses(memories), rank), memories_(memories) {}

 private:
  static std::vector<void*> addresses(const std::vector<py::buffer>& memories) {
    std::vector<void*> addresses;
    for (const py::buffer& memory : memories) {
      addresses.push_back(memory.request(true).ptr);
    }
    return addresses;
  }

  std::vector<py::buffer> memories_;
};

void define_rendezvous(py::module_& module) {
  py::enum_<poplar::Event>(module, "Event", "The stages of a collective on one rank.")
      .value("POSTED", poplar::Event::kPosted)
      .value("WRITTEN", poplar::Event::kWritten)
      .value("FINISHED", poplar::Event::kFinished);

  module.attr("RENDEZVOUS_BYTES") = sizeof(poplar::Page);
  module.attr("SLOTS") = poplar::kSlots;
  module.attr("CHUNK") = poplar::kChunk;
  module.attr("WORK_COUNTERS_BYTES") = sizeof(poplar::WorkCounters);

  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<BufferRendezvous>(module, "Rendezvous")
      .def(py::init<const std::vector<py::buffer>&, int>(), py::arg("memories"), py::arg("rank"))
      .def_property_readonly("posted", &BufferRendezvous::posted)
      .def("post", &BufferRendezvous::post, py::arg("begin"), py::arg("nbytes"),
           py::arg("shares_work"))
      .def(
          "posted_range",
          [](BufferRendezvous& self, int rank, std::int64_t collective) {
            const poplar::Slot& slot = self.slot_of(rank, collective);
            return py::make_tuple(slot.begin, slot.nbytes, slot.shares_work != 0);
          },
          py::arg("rank"), py::arg("collective"),
          "`(begin, nbytes, shares_work)` of what a rank has posted.")
      .def("mark_written", &BufferRendezvous::mark_written, py::arg("collective"))
      .def("finish", &BufferRendezvous::finish, py::arg("collective"))
      .def("is_over", &BufferRendezvous::is_over, py::arg("collective"))
      .def("wait", &BufferRendezvous::wait, py::arg("event"), py::arg("collective"),
           py::arg("seconds"), without_gil)
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
            poplar::Counter& done = self.slot_of(rank, collective).work_counters.done;
            return poplar::wait_for(done, chunks, seconds);
          },
          py::arg("rank"), py::arg("collective"), py::arg("chunks"), py::arg("seconds"),
          without_gil, "Whether this many chunks of a rank's slice are reduced within `seconds`.");
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "Partitions, pass allocation, linear programs, the shared-memory rendezvous, and checksums.";

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

  module.def("apportion", &poplar::apportion, py::arg("total"), py::arg("weights"));

  module.def("shard_boundaries", &poplar::shard_boundaries, py::arg("numel"), py::arg("shares"),
             py::arg("alignment"));

  module.def("transfers", &poplar::transfers, py::arg("old"), py::arg("new"));

  module.def(
      "cheapest_passes",
      [](const std::vector<double>& passes, std::int64_t later, std::int64_t most) {
        auto table = poplar::cheapest_passes(passes, later, most);
        return py::make_tuple(table.seconds, table.first, table.last);
      },
      py::arg("passes"), py::arg("later"), py::arg("most"));

  module.def("cheapest_cover", &poplar::cheapest_cover, py::arg("first_sizes"),
             py::arg("first_costs"), py::arg("sizes"), py::arg("costs"), py::arg("last_costs"),
             py::arg("total"));

  module.def("largest_sum", &poplar::largest_sum, py::arg("values"), py::arg("total"),
             py::call_guard<py::gil_scoped_release>());

  module.def("minimise", &poplar::minimise, py::arg("costs"), py::arg("rows"), py::arg("bounds"));

  module.def(
      "crc32c",
      [](const py::buffer& data, std::uint32_t crc, bool portable) {
        const py::buffer_info info = data.request();
        if (!PyBuffer_IsContiguous(info.view(), 'C')) {
          throw std::invalid_argument("the buffer must be contiguous");
        }
        const auto bytes = static_cast<std::size_t>(info.size * info.itemsize);
        const py::gil_scoped_release others_may_run;
        return portable ? poplar::crc32c_portable(info.ptr, bytes, crc)
                        : poplar::crc32c(info.ptr, bytes, crc);
      },
      py::arg("data"), py::arg("crc") = 0, py::arg("portable") = false);
}

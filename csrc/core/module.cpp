// poplar._core: the Python face of partition.h and counter.h. Free of torch, so it builds and is
// tested anywhere.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "counter.h"
#include "partition.h"

namespace py = pybind11;

namespace {

// The counter at a place of a writable buffer (an mmap, say), which the caller keeps alive.
std::uint32_t* counter_at(const py::buffer_info& memory, std::int64_t offset) {
  const std::int64_t bytes = memory.size * memory.itemsize;
  if (offset < 0 || offset % 4 != 0 || offset + 4 > bytes) {
    throw std::invalid_argument("a counter at byte " + std::to_string(offset) + " of " +
                                std::to_string(bytes) + ": give a multiple of 4 inside");
  }
  return reinterpret_cast<std::uint32_t*>(static_cast<char*>(memory.ptr) + offset);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "Partition arithmetic of flat buffers, and counters in shared memory.";

  module.def(
      "raise_counter",
      [](const py::buffer& memory, std::int64_t offset, std::uint32_t value) {
        const py::buffer_info info = memory.request(true);
        poplar::raise(counter_at(info, offset), value);
      },
      py::arg("memory"), py::arg("offset"), py::arg("value"),
      R"(Set a counter in shared memory and wake all processes that wait for it.

What was written into shared memory before is seen by whoever has waited for the new value.)");

  module.def(
      "read_counter",
      [](const py::buffer& memory, std::int64_t offset) {
        const py::buffer_info info = memory.request(true);
        return poplar::load(counter_at(info, offset));
      },
      py::arg("memory"), py::arg("offset"), "What a counter in shared memory is at.");

  module.def(
      "wait_for_counter",
      [](const py::buffer& memory, std::int64_t offset, std::uint32_t value, double seconds) {
        const py::buffer_info info = memory.request(true);
        const std::uint32_t* counter = counter_at(info, offset);
        const py::gil_scoped_release others_may_run;
        return poplar::wait_for(counter, value, seconds);
      },
      py::arg("memory"), py::arg("offset"), py::arg("value"), py::arg("seconds"),
      R"(Sleep until a counter in shared memory has reached `value`.

Args:
    memory: a writable buffer, an mmap say; kept until the call returns.
    offset: of the counter in it, in bytes; a multiple of 4.
    value: counters wrap around at 2**32, so it may be at most 2**31 away.
    seconds: how long to wait at most.

Returns:
    Whether it has.

Raises:
    ValueError: an offset outside of the memory.)");

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

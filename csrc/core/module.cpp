// poplar._core: the Python face of partition.h. Free of torch, so it builds and is tested anywhere.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "partition.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  module.doc() = "Partition arithmetic of flat buffers: exact, integer, free of torch.";

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

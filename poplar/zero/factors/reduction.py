"""Reduces a factored gradient: all ranks gather the rows, each owner multiplies its own part.

An element of the gradient is the sum over all rows, in rank order and in fp32. So no rank computes
what another one owns, except where every rank has the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate as running_sums

import torch
from torch import Tensor

from poplar import ops
from poplar.comm import Communicator, Work
from poplar.comm.shard_layout import Layout
from poplar.zero.factors.rows import FactoredRows, Factors
from poplar.zero.flat_parameter import FlatParameter


def weigh_rows(
    flat: FlatParameter, rows: FactoredRows, weight: float, wire_dtype: torch.dtype
) -> None:
    """Move the rows of the open pass to those that are sent, times `weight`. Local.

    `dy` is rounded to the wire dtype. So is `x`, unless the layer computes in 16 bits: then `x` has
    that dtype already and travels unchanged.
    """
    if rows.weigh(weight, _x_dtype(flat, wire_dtype), wire_dtype):
        flat.used.add(0)


def _x_dtype(flat: FlatParameter, wire_dtype: torch.dtype) -> torch.dtype:
    return flat.dtype if flat.dtype.itemsize <= wire_dtype.itemsize else wire_dtype


class RowReduction:
    """The reduction of one gradient that travels as factors: exchange counts, send, multiply."""

    def __init__(
        self,
        flat: FlatParameter,
        rows: FactoredRows,
        owned: Sequence[tuple[int, int]],
        comm: Communicator,
        wire_dtype: torch.dtype,
        *,
        accumulate: bool,
    ) -> None:
        """Start to exchange the number of rows of each rank. Collective.

        Args:
            flat: its gradient is allocated.
            rows: the weighted rows are taken from it.
            owned: by rank, start and end of the part of the gradient that it computes.
            comm: the transport.
            wire_dtype: of `dy`.
            accumulate: add to the gradient.
        """
        self._flat, self._comm, self._accumulate = flat, comm, accumulate
        numel = flat.parameters[0].numel()  # without the padding
        self._blocks = [list(blocks(low, min(high, numel), rows.inputs)) for low, high in owned]
        self._own = _Rows(rows, _x_dtype(flat, wire_dtype), wire_dtype, flat.device)
        taken = rows.take()
        self._own.allocate(sum(len(x) for x, _ in taken))
        self._own.fill(taken)
        self._all = _Rows(rows, _x_dtype(flat, wire_dtype), wire_dtype, flat.device)
        self._gathers: list[Work] = []
        count = torch.tensor([len(self._own.x)], device="cpu")
        self._what = f"the rows of layer {flat.names[0]}"
        self._counts = rows.control.exchange(count, what=f"the number of {self._what[4:]}")
        self._layout: Layout | None = None

    @property
    def data(self) -> Tensor:
        """This rank's own rows, which are held until the reduction is over."""
        return self._own.data

    def send(self) -> Work:
        """Wait for the counts and send the rows. Collective.

        A rank gets the inputs of all rows, and the gradients of those outputs that it owns. After
        an error, such as a lack of memory, it may be called again.
        """
        if self._layout is None:
            counts = (int(count) for count in self._counts())
            self._layout = Layout((0, *running_sums(counts)))
        layout = self._layout
        self._all.allocate(layout.numel)
        own = slice(*layout.bounds(self._comm.group.rank))
        outputs = [(own[0].first_row, own[-1].last_row) if own else (0, 0) for own in self._blocks]
        inputs = [(0, self._all.inputs) if own else (0, 0) for own in self._blocks]
        parts = (
            (self._all.dy, self._own.dy, outputs),
            (self._all.x, self._own.x, inputs),
        )
        for data, mine, columns in parts[len(self._gathers) :] if layout.numel else ():
            data[own].copy_(mine)
            gather = self._comm.gather_columns(data, layout, columns, what=self._what)
            self._gathers.append(gather)
        return _MultiplyWork(self._gathers, self._multiply)

    def _multiply(self) -> None:
        """Write or add the owned part of the gradient, and its sums of squares. Local."""
        flat, rank, accumulate = self._flat, self._comm.group.rank, self._accumulate
        gradient, first = flat.gradient, flat.owned[0]
        if own := self._blocks[rank]:
            first_row = own[0].first_row
            x, dy = self._all.x.float(), self._all.dy[:, first_row : own[-1].last_row].float()
            for block in own:
                part = gradient[block.start - first : block.stop - first]
                product = part.view(block.last_row - block.first_row, -1)
                own_dy = dy[:, block.first_row - first_row : block.last_row - first_row]
                own_x = x[:, block.first_column : block.last_column]
                product.addmm_(own_dy.t(), own_x, beta=float(accumulate))
        if not accumulate:
            gradient[max(flat.parameters[0].numel() - first, 0) :].zero_()  # the padding
        part_of_layout = flat.intersect_owned(*flat.layout.bounds(rank))
        if part_of_layout is not None:
            flat.squares.copy_(ops.block_sums_of_squares(gradient[part_of_layout]))


@dataclass(frozen=True)
class Block:
    """Elements `[start, stop)` of a flat matrix that form a block of it."""

    start: int
    stop: int
    first_row: int
    last_row: int
    first_column: int
    last_column: int


def blocks(start: int, stop: int, width: int) -> Iterator[Block]:
    """Cut elements `[start, stop)` of a matrix of `width` columns into at most three blocks.

    They are the end of a row, whole rows, and the beginning of a row.
    """
    while start < stop:
        row, column = divmod(start, width)
        whole_rows = (stop - start) // width if column == 0 else 0
        if whole_rows:
            end = start + whole_rows * width
            yield Block(start, end, row, row + whole_rows, 0, width)
        else:
            end = min(stop, (row + 1) * width)
            yield Block(start, end, row, row + 1, column, column + end - start)
        start = end


class _Rows:
    """Rows of both factors in one buffer."""

    def __init__(
        self, rows: FactoredRows, x_dtype: torch.dtype, dy_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.inputs, self._outputs = rows.inputs, rows.outputs
        self._dtypes = dy_dtype, x_dtype
        self.data = torch.empty(0, dtype=torch.uint8, device=device)
        self.allocate(0)

    def allocate(self, count: int) -> None:
        """Make room for so many rows."""
        sizes = [
            count * width * dtype.itemsize
            for width, dtype in zip((self._outputs, self.inputs), self._dtypes, strict=True)
        ]
        if self.data.numel() != sum(sizes):
            self.data = self.data.new_empty(sum(sizes))
        # The wider dtype comes first, so that both parts are aligned.
        dy, x = self.data.split(sizes)
        self.dy = dy.view(self._dtypes[0]).view(count, self._outputs)
        self.x = x.view(self._dtypes[1]).view(count, self.inputs)

    def fill(self, parts: Sequence[Factors]) -> None:
        """Copy rows, as many as there is room for."""
        if parts:
            torch.cat([x for x, _ in parts], out=self.x)
            torch.cat([dy for _, dy in parts], out=self.dy)


class _MultiplyWork:
    """The gathers of a reduction, and the product that follows them."""

    def __init__(self, gathers: Sequence[Work], multiply: Callable[[], None]) -> None:
        self._gathers, self._multiply = gathers, multiply

    def wait(self) -> float:
        """As `Work.wait`; called once."""
        waited = sum(gather.wait() for gather in self._gathers)
        self._multiply()
        return waited

"""A flat parameter whose gradient is reduced as factors.

All ranks send their rows to the owners, and each owner multiplies its own part. An element of the
gradient is the sum over all rows, in rank order and in fp32. So no rank computes what another one
owns, except where every rank has the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from poplar import ops
from poplar.comm import Communicator, Control, Work
from poplar.comm.communicator import CallbackWork, Splits
from poplar.zero.factors.capture import CapturingForward, Rows
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.model_hook import Removable

if TYPE_CHECKING:
    from poplar.zero.stages.strategy import Strategy

_BYTE = torch.uint8


class FactoredParameter(FlatParameter):
    """The weight of one `nn.Linear`: its gradient is the sum of `dy[i]` times `x[i]`.

    The rows of a pass are captured by the backward, weighted when the pass accumulates or reduces,
    and sent by the last pass of a step, or by each pass.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        layer: nn.Linear,
        control: Control,
        **options: Any,
    ) -> None:
        """As `FlatParameter`.

        Args:
            name: of the unit.
            parameters: the weight, with its name.
            layer: the module.
            control: exchanges the numbers of rows.
            **options: of `FlatParameter`.
        """
        super().__init__(name, parameters, **options)
        self.forward = CapturingForward(layer, self.names[0])
        self._control = control
        self._weighted: list[Rows] = []
        self._reduced = False
        """A reduction of this step has written the gradient."""

    def watch(self, ready: Callable[[nn.Parameter], None]) -> list[Removable]:
        (weight,) = self.parameters

        def complete(token: Tensor) -> None:
            token.grad = None
            ready(weight)

        self.forward.install()
        token_hook = self.forward.token.register_post_accumulate_grad_hook(complete)
        check = weight.register_post_accumulate_grad_hook(lambda _weight: self.check_gradients())
        return [self.forward, token_hook, check]

    def check_gradients(self, *_parameters: nn.Parameter) -> None:
        (weight,) = self.parameters
        if weight.grad is not None:
            weight.grad = None
            raise RuntimeError(
                f"{self.names[0]} got a gradient of its own, but Plan.factored names its layer, so "
                "only what the forward of the layer captures is sent; call the layer instead of "
                "using its weight, or leave the layer out of Plan.factored"
            )

    def held_gradients(self) -> list[Tensor]:
        rows = [*self.forward.captured, *self._weighted]
        return [*super().held_gradients(), *(factor for each in rows for factor in each)]

    def begin_step(self) -> None:
        super().begin_step()
        self._weighted.clear()
        self._reduced = False

    def drop_parameter_gradients(self) -> None:
        super().drop_parameter_gradients()
        self.forward.captured.clear()

    def accumulate(self, strategy: Strategy, weight: float) -> None:
        """Multiply the rows of the open pass by its weight, in fp32, and round them once. Local.

        With weight 0 they are dropped, so NaN has no effect. `dy` is rounded to the wire dtype. So
        is `x`, unless the layer computes in 16 bits: then `x` has that dtype already.
        """
        captured, wire_dtype = self.forward.captured.copy(), strategy.codec.wire_dtype
        self.forward.captured.clear()
        if captured:
            self.used.add(0)
        for x, dy in captured if weight != 0.0 else ():
            rounded = (dy.float() * weight).to(wire_dtype)
            self._weighted.append((x.to(self._x_dtype(wire_dtype)), rounded))

    def reduce(self, strategy: Strategy, weight: float) -> None:
        self.accumulate(strategy, weight)
        strategy.ensure_gradient(self, self._allocate_gradient)
        rows, self._weighted = self._weighted, []
        ranks, wire_dtype = range(strategy.comm.group.size), strategy.codec.wire_dtype
        reduction = RowReduction(
            self,
            rows,
            [strategy.owned_part(self.layout, rank) for rank in ranks],
            (wire_dtype, self._x_dtype(wire_dtype)),
            strategy.comm,
            self._control,
            accumulate=self._reduced,
        )
        self._reduced = True
        strategy.reductions.defer(reduction)

    def _x_dtype(self, wire_dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype.itemsize <= wire_dtype.itemsize else wire_dtype

    def _allocate_gradient(self) -> None:
        """Nothing is packed, so each rank needs only the part that it computes."""
        low, high = self.owned
        self.gradient = torch.empty(high - low, dtype=torch.float32, device=self.device)


class RowReduction:
    """The reduction of one gradient that travels as factors: exchange counts, send, multiply.

    A row is sent as bytes: `dy`, whose dtype is at least as wide, and then `x`.
    """

    def __init__(
        self,
        flat: FlatParameter,
        rows: Sequence[Rows],
        owned: Sequence[tuple[int, int]],
        dtypes: tuple[torch.dtype, torch.dtype],
        comm: Communicator,
        control: Control,
        *,
        accumulate: bool,
    ) -> None:
        """Start to exchange the number of rows of each rank. Collective.

        Args:
            flat: its gradient is allocated.
            rows: weighted.
            owned: by rank, start and end of the part of the gradient that it computes.
            dtypes: of `dy` and of `x`.
            comm: the transport.
            control: the control channel of the ranks.
            accumulate: add to the gradient.
        """
        self._flat, self._dtypes, self._comm, self._accumulate = flat, dtypes, comm, accumulate
        (weight,) = flat.parameters
        outputs, inputs = weight.shape
        self._blocks = [list(blocks(low, min(high, weight.numel()), inputs)) for low, high in owned]
        self._dy_bytes = outputs * dtypes[0].itemsize
        self._x_bytes = inputs * dtypes[1].itemsize
        both = [torch.cat([_bytes(dy), _bytes(x)], 1) for x, dy in rows]
        none = torch.empty(0, self._dy_bytes + self._x_bytes, dtype=_BYTE, device=flat.device)
        self.data = torch.cat(both) if both else none
        """This rank's own rows, which are held until the reduction is over."""
        self._what = f"the rows of layer {flat.names[0]}"
        count = torch.tensor([len(self.data)], device="cpu")
        self._counts = control.exchange(count, what=f"the number of {self._what[4:]}")
        self._rows: list[int] | None = None

    def send(self) -> Work:
        """Wait for the counts and send the rows. Collective.

        A rank gets the inputs of all rows, and the gradients of those outputs that it owns. After
        an error, such as a lack of memory, it may be called again.
        """
        if self._rows is None:
            self._rows = [int(count) for count in self._counts()]
        rows = self._rows
        needed = [self._needed_bytes(own) for own in self._blocks]
        width = sum(part.stop - part.start for part in needed[self._comm.group.rank])
        parts = [torch.cat([self.data[:, part] for part in each], 1) for each in needed]
        sent = torch.cat([part.view(-1) for part in parts])
        received_sizes = [count * width for count in rows]
        sent_sizes = [part.numel() for part in parts]
        received = sent.new_empty(sum(received_sizes))
        work = self._comm.all_to_all(
            received, sent, Splits(received_sizes, sent_sizes), what=self._what
        )
        left = self._blocks[self._comm.group.rank].copy()
        return CallbackWork(work, lambda: self._multiply(received.view(sum(rows), width), left))

    def _needed_bytes(self, own: Sequence[Block]) -> tuple[slice, slice]:
        """What a rank that owns these blocks needs of each row: of `dy`, and of `x`."""
        if not own:
            return slice(0, 0), slice(0, 0)
        size = self._dtypes[0].itemsize
        dy = slice(own[0].rows.start * size, own[-1].rows.stop * size)
        return dy, slice(self._dy_bytes, self._dy_bytes + self._x_bytes)

    def _multiply(self, received: Tensor, left: list[Block]) -> None:
        """Write or add the owned part of the gradient, and its sums of squares. Local.

        Args:
            received: by row, the bytes that this rank needs.
            left: its blocks that have not been computed. After an error it may be called again.
        """
        flat, rank = self._flat, self._comm.group.rank
        gradient, first = flat.gradient, flat.owned[0]
        if left:
            own, dy_bytes = self._blocks[rank], received.shape[1] - self._x_bytes
            dy = _from_bytes(received[:, :dy_bytes], self._dtypes[0])
            x = _from_bytes(received[:, dy_bytes:], self._dtypes[1])
        while left:
            block, first_row = left[0], own[0].rows.start
            part = gradient[block.start - first : block.stop - first]
            own_dy = dy[:, block.rows.start - first_row : block.rows.stop - first_row]
            own_x = x[:, block.columns.start : block.columns.stop]
            product = part.view(len(block.rows), len(block.columns))
            product.addmm_(own_dy.t(), own_x, beta=float(self._accumulate))
            del left[0]
        if not self._accumulate:
            gradient[max(flat.parameters[0].numel() - first, 0) :].zero_()  # the padding
        part_of_layout = flat.intersect_owned(*flat.layout.bounds(rank))
        if part_of_layout is not None:
            flat.squares.copy_(ops.block_sums_of_squares(gradient[part_of_layout]))


def _bytes(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device).copy_(rows).view(_BYTE)


def _from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows in fp32."""
    shape = len(data), data.shape[1] // dtype.itemsize
    rows = torch.empty(shape, dtype=dtype, device=data.device)
    rows.view(_BYTE).copy_(data)
    return rows.float()


@dataclass(frozen=True)
class Block:
    """Elements of a flat matrix, from `start` on, that form a block of it."""

    start: int
    rows: range
    columns: range

    @property
    def stop(self) -> int:
        """The end of the elements."""
        return self.start + len(self.rows) * len(self.columns)


def blocks(start: int, stop: int, width: int) -> Iterator[Block]:
    """Cut elements `[start, stop)` of a matrix of `width` columns into at most three blocks.

    They are the end of a row, whole rows, and the beginning of a row.
    """
    while start < stop:
        row, column = divmod(start, width)
        whole_rows = (stop - start) // width if column == 0 else 0
        end = width if whole_rows else min(width, column + stop - start)
        block = Block(start, range(row, row + max(1, whole_rows)), range(column, end))
        yield block
        start = block.stop

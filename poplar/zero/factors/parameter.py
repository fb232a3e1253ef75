"""A flat parameter whose gradient is reduced as factors.

All ranks send their rows to the owners, and each owner multiplies its own part. An element of the
gradient is the sum over all rows, in rank order and in fp32. So no rank computes what another one
owns, except where every rank has the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from poplar import ops
from poplar.comm import Control, Work
from poplar.comm.communicator import CallbackWork, Splits
from poplar.comm.shard_layout import ALIGNMENT, Layout
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
        """As `FlatParameter`, of the weight of `layer`; `control` exchanges numbers of rows."""
        super().__init__(name, parameters, **options)
        # Owners have whole rows of the weight, or all of it where parts are tensors of their own.
        self.steps = (0 if self.separate[0] else self._rows_step(),)
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
                "using its weight, without functional_call on tensors computed from the weight, "
                "torch.func and hooks on its gradient, or leave the layer out of Plan.factored "
                "(autotune and search: factored='never')"
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

        With weight 0 they are dropped, so NaN has no effect.
        """
        captured = [*self.forward.captured]
        self.forward.captured.clear()
        x_dtype, dy_dtype = self.dtypes(strategy.codec.wire_dtype)
        if captured:
            self.used.add(0)
        for x, dy in captured if weight != 0.0 else ():
            self._weighted.append((x.to(x_dtype), (dy.float() * weight).to(dy_dtype)))

    def reduce(self, strategy: Strategy, weight: float) -> None:
        self.accumulate(strategy, weight)
        strategy.ensure_gradient(self, self._new_gradient)
        rows, self._weighted = self._weighted, []
        reduction = RowReduction(self, rows, strategy, self._control, accumulate=self._reduced)
        self._reduced = True
        strategy.reductions.defer(reduction)

    def layout_under(self, shares: Sequence[float]) -> Layout:
        """Owners have whole rows of the weight, for which they need the gradients of outputs."""
        unit = self._rows_step()
        layout = Layout.from_shares(-(-self.numel // unit) * unit, shares, unit)
        return Layout(tuple(min(offset, self.numel) for offset in layout.offsets))

    def _rows_step(self) -> int:
        """Elements of the fewest rows that end at a multiple of 64."""
        return math.lcm(ALIGNMENT, self.parameters[0].shape[1])

    def outputs_in(self, low: int, high: int) -> tuple[int, int]:
        """The outputs whose weights are these elements: the first one, and an end."""
        outputs, inputs = self.parameters[0].shape
        return min(outputs, low // inputs), min(outputs, -(-high // inputs))

    def dtypes(self, wire_dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """In which `x` and `dy` are sent: `x` as it is, if the layer computes in 16 bits."""
        is_narrow = self.dtype.itemsize <= wire_dtype.itemsize
        return self.dtype if is_narrow else wire_dtype, wire_dtype

    def _new_gradient(self) -> Tensor:
        """Nothing is packed, so each rank needs only the part that it computes."""
        low, high = self.owned
        return torch.empty(high - low, dtype=torch.float32, device=self.device)


class RowReduction:
    """The reduction of one gradient that travels as factors: exchange counts, send, multiply.

    A row is sent as bytes: `dy`, whose dtype is at least as wide, and then `x`.
    """

    def __init__(
        self,
        flat: FactoredParameter,
        rows: Sequence[Rows],
        strategy: Strategy,
        control: Control,
        *,
        accumulate: bool,
    ) -> None:
        """Start to exchange the number of weighted rows of each rank. Collective.

        The gradient of `flat` is allocated; `accumulate`: add to it. The strategy says which part
        of it each rank computes.
        """
        self._flat, self._comm, self._accumulate = flat, strategy.comm, accumulate
        self._x_dtype, self._dy_dtype = flat.dtypes(strategy.codec.wire_dtype)
        parts = [strategy.owned_part(flat.layout, rank) for rank in range(self._comm.group.size)]
        self._owned = [flat.outputs_in(*part) for part in parts]
        """By rank, the first output of the layer whose weights it owns, and the one after."""
        outputs, inputs = flat.parameters[0].shape
        self._dy_bytes = outputs * self._dy_dtype.itemsize
        width = self._dy_bytes + inputs * self._x_dtype.itemsize
        none = torch.empty(0, width, dtype=_BYTE, device=flat.device)
        both = [torch.cat([_bytes(dy), _bytes(x)], 1) for x, dy in rows]
        self.data = torch.cat([none, *both])
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
        parts = [self._needed(*owned) for owned in self._owned]
        width = parts[self._comm.group.rank].shape[1]
        sizes = Splits([count * width for count in self._rows], [part.numel() for part in parts])
        sent = torch.cat([part.view(-1) for part in parts])
        received = sent.new_empty(sum(self._rows), width)
        work = self._comm.all_to_all(received.view(-1), sent, sizes, what=self._what)
        return CallbackWork(CallbackWork(work, lambda: self._multiply(received)), self._sum_squares)

    def _needed(self, first: int, last: int) -> Tensor:
        """The part of this rank's rows that the owner of these outputs needs."""
        if first == last:
            return self.data[:, :0]
        size = self._dy_dtype.itemsize
        dy, x = self.data[:, first * size : last * size], self.data[:, self._dy_bytes :]
        return torch.cat([dy, x], 1)

    def _multiply(self, received: Tensor) -> None:
        """Write or add the owned part of the gradient, from the received bytes of each row."""
        gradient, (first, last) = self._flat.gradient, self._owned[self._comm.group.rank]
        dy_bytes = (last - first) * self._dy_dtype.itemsize
        owned = (last - first) * self._flat.parameters[0].shape[1]
        if owned:
            dy = _from_bytes(received[:, :dy_bytes], self._dy_dtype)
            x = _from_bytes(received[:, dy_bytes:], self._x_dtype)
            product = gradient[:owned].view(last - first, -1)
            product.addmm_(dy.t(), x, beta=float(self._accumulate))
        if not self._accumulate:
            gradient[owned:].zero_()  # the padding

    def _sum_squares(self) -> None:
        flat = self._flat
        part_of_layout = flat.intersect_owned(*flat.layout.bounds(self._comm.group.rank))
        if part_of_layout is not None and flat.squares is not None:
            flat.squares.copy_(ops.block_sums_of_squares(flat.gradient[part_of_layout]))


def _bytes(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device).copy_(rows).view(_BYTE)


def _from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows in fp32."""
    shape = len(data), data.shape[1] // dtype.itemsize
    rows = torch.empty(shape, dtype=dtype, device=data.device)
    rows.view(_BYTE).copy_(data)
    return rows.float()

"""A flat buffer: parameters of one kind laid end to end, gathered and reduced as one.

Every parameter starts at a multiple of 64 elements. So every cut, of a shard or of a parameter, is
aligned: the vector loops of an optimizer then see the same lanes whatever the shares, and give the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from poplar import ops
from poplar.comm.shard_layout import ALIGNMENT, Layout

PACKABLE = (torch.float32, torch.bfloat16, torch.float16)


class FlatParameter:
    """Parameters that share a dtype, a device and whether they are trained.

    What a strategy makes of it is in the attributes below the parameters: how it is cut, which part
    this rank's optimizer updates, and where values and gradients live.
    """

    layout: Layout
    """How the buffer is cut among ranks."""
    owned: tuple[int, int]
    """The part whose optimizer state this rank holds."""
    values: Tensor
    """All parameter values, in `dtype`; at stage 3 without storage unless gathered."""
    shard: Tensor
    """Values of the owned part, in `dtype`; a view of `values` unless those are sharded, and then
    where the transport sends it from: `Strategy.before_writing` comes before it is written."""
    master: Tensor
    """fp32 values of the owned part: `shard` itself if that is fp32 already."""
    gradient: Tensor
    """fp32 mean gradient of the owned part, once reduced; empty between steps."""
    squares: Tensor
    """Block sums of squares of the layout's slice of this rank, as its reduction left them."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        dtype: torch.dtype,
        trained: bool,
        groups: Sequence[int],
    ) -> None:
        self.name = name
        self.names = tuple(name for name, _ in parameters)
        self.parameters = tuple(parameter for _, parameter in parameters)
        self.dtype = dtype
        self.trained = trained
        self.groups = tuple(groups)
        """Each parameter's param group in the optimizer, ascending; -1: in none."""
        self.device = self.parameters[0].device
        self.offsets, self.numel = _aligned_offsets([p.numel() for p in self.parameters])
        self.used: set[int] = set()
        """Parameters (by position) that got a gradient on this rank in this step."""
        self.gradient = self.squares = torch.empty(0, device=self.device)
        self._squares_version: int | None = None
        self._versions: list[int] = []
        self._placeholder = [_placeholder(p.shape, dtype, self.device) for p in self.parameters]

    def mark_squares_valid(self) -> None:
        """The gradient is reduced, and `squares` are of it."""
        self._squares_version = None if self.gradient.is_inference() else self.gradient._version

    def invalidate_squares(self) -> None:
        """From here on the gradient may be written unnoticed: `.grad` shows it."""
        self._squares_version = None

    def sums_of_squares(self, owned: slice) -> Tensor:
        """Block sums of squares of the same slice; taken anew if it was written since."""
        if self._squares_version is not None and self._squares_version == self.gradient._version:
            return self.squares
        return ops.block_sums_of_squares(self.gradient[owned])

    def initial_values(self) -> tuple[Tensor, Tensor]:
        """The model's present values, flat: in fp32 and in `dtype` (one tensor if that is fp32)."""
        exact = torch.empty(self.numel, dtype=torch.float32, device=self.device)
        with torch.no_grad():
            ops.pack_(exact, [p.detach() for p in self.parameters], list(self.offsets), 1.0)
        return exact, exact if self.dtype is torch.float32 else exact.to(self.dtype)

    def attach_parameters(self) -> None:
        """Point the user's parameters into `values`."""
        for position, (parameter, offset) in enumerate(
            zip(self.parameters, self.offsets, strict=True)
        ):
            part = self.values[offset : offset + parameter.numel()]
            parameter.data = part.view(parameter.shape)
            if self._versions:
                torch._C._autograd._unsafe_set_version_counter(
                    (parameter,), (self._versions[position],)
                )
        self._versions = []

    def adopt_replaced_data(self) -> bool:
        """Make parameters views again whose `.data` the user has replaced, with the new values.

        Returns:
            Whether there were any.

        Raises:
            RuntimeError: the new data has another shape, dtype or device, or the values are hidden.
        """
        replaced = False
        step = self.values.element_size()
        hidden = self.values.untyped_storage().nbytes() == 0
        start = 0 if hidden else self.values.data_ptr()
        for position, (parameter, offset) in enumerate(
            zip(self.parameters, self.offsets, strict=True)
        ):
            expected = self._placeholder[position].data_ptr() if hidden else start + offset * step
            if parameter.numel() == 0 or parameter.data_ptr() == expected:
                continue
            part = self.values[offset : offset + parameter.numel()] if not hidden else None
            same_kind = parameter.dtype is self.dtype and parameter.device == self.device
            if part is None or not same_kind or parameter.numel() != part.numel():
                raise RuntimeError(
                    f"the data of parameter {self.names[position]!r} was replaced by a tensor of "
                    f"shape {tuple(parameter.shape)}, {parameter.dtype} on {parameter.device}; "
                    "write into it (p.data.copy_, load_state_dict), at stage 3 inside "
                    "full_parameters(writeback=True), or convert the model before the optimizer"
                )
            part.copy_(parameter.data.reshape(-1))
            parameter.data = part.view(self._placeholder[position].shape)
            replaced = True
        return replaced

    def detach_parameters(self) -> None:
        """Leave the user's parameters with their shape and NaN for every value.

        Reading memory that has been given back would crash the process; NaN is loud and safe. A
        backward that reads what the forward saved of a parameter while it is hidden is refused by
        autograd: its version has moved on, until the values are shown again.
        """
        if not self._versions:
            self._versions = [parameter._version for parameter in self.parameters]
            torch.autograd.graph.increment_version(self.parameters)
        for parameter, absent in zip(self.parameters, self._placeholder, strict=True):
            parameter.data = absent

    def take_gradients(self, weight: float) -> tuple[list[Tensor], list[int]]:
        """Move the gradients out of the parameters, with their offsets; none are left behind.

        A pass of weight 0 counts for nothing, NaN included, but its parameters are used.
        """
        gradients, offsets = [], []
        for position, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            if gradient.is_sparse:
                raise TypeError(
                    f"parameter {self.names[position]!r} has a sparse gradient; flat buffers are "
                    "dense: use a layer with dense gradients"
                )
            self.used.add(position)
            if weight != 0.0:
                gradients.append(gradient)
                offsets.append(self.offsets[position])
        return gradients, offsets

    def span(self, position: int) -> tuple[int, int]:
        """The aligned part of the buffer that belongs to one parameter, its padding included."""
        end = self.offsets[position + 1] if position + 1 < len(self.offsets) else self.numel
        return self.offsets[position], end

    def intersect_owned(self, start: int, stop: int) -> slice | None:
        """Where `[start, stop)` lies in the owned part; None if the two don't meet."""
        low, high = max(start, self.owned[0]), min(stop, self.owned[1])
        return slice(low - self.owned[0], high - self.owned[0]) if low < high else None


def _aligned_offsets(numels: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), end


def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)

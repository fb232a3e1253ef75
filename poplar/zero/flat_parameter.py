"""A flat parameter: several parameters in one buffer that is unsharded and reduced as a whole.

Every parameter starts at a multiple of 64 elements, and so does every shard. Vectorized optimizer
loops then process the same elements in the same lanes and give the same bits for any shares.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence, Set
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from poplar import ops
from poplar.comm.shard_layout import ALIGNMENT, Layout
from poplar.system.storage import with_own_storage
from poplar.zero.absent_parameter import absent_data, classes_of, direct_access
from poplar.zero.checks.placeholder_gradient import PlaceholderGradient
from poplar.zero.model_hook import Removable

if TYPE_CHECKING:
    from poplar.zero.stages.strategy import Strategy

PACKABLE = (torch.float32, torch.bfloat16, torch.float16)


class UnshardedBuffer:
    """A buffer whose values other memory may replace for a time."""

    values: Tensor
    """All values; at stage 3 without storage while sharded. Set by `use_values`."""
    _views: list[Tensor]
    _replaced: tuple[Tensor, list[Tensor]] | None = None
    """`values` and its views, while lasting values replace them."""

    def use_values(self, values: Tensor, *, lasting: bool) -> None:
        """Set `values`, of which `attach_parameters` makes the user's tensors views.

        Args:
            values: as many elements as the buffer has; it may lose its memory afterwards.
            lasting: its memory exists as long as one of these views. Each tensor then has a storage
                of its own, so that savers do not take them for tied weights.
        """
        raise NotImplementedError

    def use_lasting_values(self) -> None:
        """Replace `values` by new memory until `drop_lasting_values`."""
        with torch.inference_mode(False):
            new = torch.empty_like(self.values)
        self._replaced = self.values, self._views
        self.use_values(new, lasting=True)

    @property
    def has_lasting_values(self) -> bool:
        """Whether this is between `use_lasting_values` and `drop_lasting_values`."""
        return self._replaced is not None

    def drop_lasting_values(self) -> None:
        """Use the `values` from before `use_lasting_values` again."""
        assert self._replaced is not None
        (self.values, self._views), self._replaced = self._replaced, None


class FlatParameter(UnshardedBuffer):
    """A buffer for parameters of one dtype on one device, either all trained or all frozen.

    The strategy sets the layout, the owned part and the tensors below (`divide`,
    `hold_gradient`).
    """

    layout: Layout
    """How the buffer is divided among ranks."""
    owned: tuple[int, int]
    """Start and end of the part whose optimizer state this rank holds."""
    shard: Tensor
    """Values of the owned part, in `dtype`. A view of `values`, or at stage 3 the memory from which
    the transport sends: call `Strategy.wait_for_readers` before writing to it."""
    master: Tensor
    """fp32 values of the owned part: `shard` itself if `dtype` is fp32, unless `is_hosted` or
    `sends_differences`."""
    sent: Tensor | None = None
    """If `sends_differences`, the values of `shard` after the last update: see
    [Note: differences] in `stages.strategy`."""
    gradient: Tensor
    """fp32 mean gradient of the owned part, once reduced; empty between steps."""
    squares: Tensor | None
    """Sums of squares, per block, of this rank's slice of the layout, by the reduction; or None."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        dtype: torch.dtype,
        trained: bool,
        groups: Sequence[int],
        steps: Sequence[int | None] = (),
        is_local: bool = False,
    ) -> None:
        self.name = name
        self.names = tuple(name for name, _ in parameters)
        self.parameters = tuple(parameter for _, parameter in parameters)
        self.dtype = dtype
        self.trained = trained
        self.groups = tuple(groups)
        """Index of each parameter's param group in the optimizer, ascending; -1: in none."""
        given = tuple(steps) or (None,) * len(parameters)
        self.steps = tuple(ALIGNMENT if step is None else step for step in given)
        """Of each parameter, the elements between two points where it may be cut; 0: nowhere."""
        self.separate = tuple(step is not None for step in given)
        """Which parameters, or parts, are updated as tensors of their own."""
        self.device = self.parameters[0].device
        self.offsets, self.numel = aligned_offsets([p.numel() for p in self.parameters])
        self.used: set[int] = set()
        """Positions of the parameters that got a gradient on this rank in this step."""
        self.removed: Set[int] = set()
        """Positions of the parameters that are left out of this step, because `.grad` is None: the
        user has set it, or it shows the gradient and no rank has one."""
        self.has_placeholders = False
        """`.grad` of each parameter was set to a placeholder, which Poplar has not dropped yet."""
        self.is_local = is_local
        """Every rank has other values, all of which it owns: nothing is communicated. See
        [Note: local parameters] in `stages.strategy`."""
        self.is_hosted = False
        """`master` and the optimizer state are in host memory: see [Note: host state]."""
        self.sends_differences = False
        """Updates are sent as compressed differences: see [Note: differences]."""
        self._hooks: list[tuple[nn.Parameter, int]] = []
        """The hooks of `watch` by their numbers."""
        self._no_gradient = torch.empty(0, device=self.device)
        self.drop_gradient()
        self._versions: tuple[int, ...] = ()
        self._views = []
        self._placeholder = [absent_data(p.shape, dtype, self.device) for p in self.parameters]
        self._placeholder_gradients: list[PlaceholderGradient] = []
        self._places: tuple[list[Any], ...] = ()
        """`_places_of` the data that the parameters have, once `replaced` has looked for it."""
        self._classes: list[tuple[type[nn.Parameter], type[nn.Parameter]]] = []
        """Of each parameter, with and without its values, once it has been detached."""

    def divide(
        self, layout: Layout, owned: tuple[int, int], shard: Tensor, master: Tensor | None
    ) -> None:
        """Set how the buffer is divided, and the values of the owned part.

        `master` is in fp32; None: the values of `shard`.
        """
        self.layout, self.owned, self.shard = layout, owned, shard
        master = shard if master is None else master
        # What moves to an unchanged owner is not copied, and may have been the shard so far.
        is_shard = master.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        device = "cpu" if self.is_hosted else self.device
        copies = is_shard and (self.is_hosted or self.has_masters)
        self.master = master.to(device, copy=copies)
        self.sent = shard.clone() if self.sends_differences else None

    def keep_on_host(self, hosted: bool) -> None:
        """Choose where the next `divide` puts `master`, and its owner the optimizer state."""
        self.is_hosted = hosted

    def mark_sent(self) -> None:
        """The values of `shard` come from the update, not from the user."""
        if self.sent is not None:
            self.sent.copy_(self.shard)

    def send_differences(self, sends: bool) -> None:
        """Choose whether updates are sent as differences, from the next `divide` on."""
        self.sends_differences = sends

    @property
    def has_masters(self) -> bool:
        """Whether the ranks compute with other values than the fp32 ones that they update."""
        return self.trained and (self.dtype is not torch.float32 or self.sends_differences)

    def hold_gradient(self, gradient: Tensor, squares: Tensor) -> None:
        """Hold the mean gradient of a step, which may not be computed yet, and its squares."""
        self.gradient, self.squares = gradient, squares

    def drop_gradient(self) -> None:
        """Free the gradient. Allocates nothing, so it cannot fail between two agreements."""
        self.gradient = self.squares = self._no_gradient

    def begin_step(self) -> None:
        """Drop what earlier passes have left on this rank, except `.grad`."""
        self.used.clear()
        self.removed = set()

    def watch(self, ready: Callable[[nn.Parameter], None]) -> list[Removable]:
        """Call `ready(parameter)` when autograd has accumulated the gradient of a parameter."""
        handles = [p.register_post_accumulate_grad_hook(ready) for p in self.parameters]
        numbers = (handle.id for handle in handles)
        self._hooks = list(zip(self.parameters, numbers, strict=True))
        return [*handles]

    def run_hooks_last(self) -> None:
        """Run the hooks of `watch` after those that the user has registered since.

        torch runs the hooks of a tensor in the order of its dictionary.
        """
        for parameter, own in self._hooks:
            hooks = parameter._post_accumulate_grad_hooks
            if hooks and own in hooks and next(reversed(hooks)) != own:
                hooks[own] = hooks.pop(own)

    def layout_under(self, shares: Sequence[float]) -> Layout:
        """The layout that comes closest to these shares."""
        return Layout.from_shares(self.numel, shares)

    @property
    def is_cut_anywhere(self) -> bool:
        """Whether every multiple of 64 elements may be a boundary."""
        return not any(self.separate)

    def cuts_around(self, element: float) -> tuple[int, int]:
        """The last point up to `element` where the buffer may be cut, and the next one."""
        position = max(0, bisect_right(self.offsets, element) - 1)
        start, stop = self.span(position)
        step, numel = self.steps[position], self.parameters[position].numel()
        if not step:
            return start, stop
        # No part is smaller than a step where parts are tensors of their own.
        cuts = max(0, numel - (step if self.separate[position] else 1)) // step
        before = min(max(0, int(element) - start) // step, cuts)
        after = start + (before + 1) * step if before < cuts else stop
        return start + before * step, after

    def check_gradients(self, *parameters: nn.Parameter) -> None:
        """Raise if gradients of these parameters, by default of all, cannot be reduced."""
        for parameter in parameters or self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                position = next(n for n, own in enumerate(self.parameters) if own is parameter)
                raise TypeError(
                    f"parameter {self.names[position]!r} has a sparse gradient, but flat "
                    "parameters are dense; use a layer with dense gradients"
                )

    def held_gradients(self) -> list[Tensor]:
        """What the passes have left that has not been accumulated or reduced."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def accumulate(self, strategy: Strategy, weight: float) -> None:
        """Add what a pass has left, times `weight`, to what earlier passes of the step have."""
        strategy.accumulate(self, weight)

    def reduce(self, strategy: Strategy, weight: float) -> None:
        """As `accumulate`, and start to reduce the sum over all ranks. Collective."""
        strategy.reduce(self, weight)

    def drop_parameter_gradients(self) -> None:
        """Drop the gradients of the open pass: set `.grad` of the parameters to None."""
        with direct_access():
            for parameter in self.parameters:
                parameter.grad = None
        self.has_placeholders = False

    def set_placeholder_gradients(self) -> None:
        """Set `.grad` of the parameters to tensors that raise if they are used, once."""
        if self.has_placeholders:  # what the user has put in their place since is not overwritten
            return
        if not self._placeholder_gradients:
            self._placeholder_gradients = [PlaceholderGradient(p) for p in self.parameters]
        self.has_placeholders = True
        placeholders = zip(self.parameters, self._placeholder_gradients, strict=True)
        with direct_access():
            for parameter, placeholder in placeholders:
                if parameter.grad is None:
                    parameter.grad = placeholder

    def replaced_gradients(self) -> dict[int, Tensor | None]:
        """By position, what the user has set `.grad` to in place of a placeholder."""
        if not self.has_placeholders:
            return {}
        with direct_access():
            now = [parameter.grad for parameter in self.parameters]
        if all(map(is_, now, self._placeholder_gradients)):  # the usual case
            return {}
        pairs = zip(now, self._placeholder_gradients, strict=True)
        return {at: found for at, (found, own) in enumerate(pairs) if found is not own}

    def leave_out(self, removed: Set[int]) -> None:
        """Leave these parameters, and no others, out of the step: see `removed`."""
        if removed != self.removed:
            self.used = (self.used | self.removed) - removed
            self.removed = removed

    def drop_squares(self) -> None:
        """No reduction has computed `squares`, or the user may have changed the gradient since."""
        self.squares = None

    def sums_of_squares(self, owned: slice) -> Tensor:
        """Sums of squares per block of `gradient[owned]`, computed now if there are none."""
        if self.squares is not None:
            return self.squares
        return ops.block_sums_of_squares(self.gradient[owned])

    def free(self) -> None:
        """Free values and masters, which another flat parameter has taken over."""
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        self.values = self.shard = self.master = nothing
        self.sent = None
        self._views, self._replaced = [], None

    def packed_parameters(self) -> Tensor:
        """The values of the user's parameters as one flat tensor in fp32."""
        packed = torch.empty(self.numel, dtype=torch.float32, device=self.device)
        with torch.no_grad():
            ops.pack_(packed, [p.detach() for p in self.parameters], list(self.offsets), 1.0)
        return packed

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """Of a buffer like this one, what belongs to each parameter, in its shape."""
        places = zip(self._placeholder, self.offsets, strict=True)
        return [buffer[start : start + own.numel()].view(own.shape) for own, start in places]

    def use_values(self, values: Tensor, *, lasting: bool) -> None:
        views = self.parts(values)
        self.values, self._views = values, list(map(with_own_storage, views)) if lasting else views

    def attach_parameters(self) -> None:
        """Make the user's parameters views of `values`."""
        for parameter, (present, _) in zip(self.parameters, self._classes, strict=False):
            parameter.__class__ = present
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view
        self._places = ()
        if self._versions:
            torch._C._autograd._unsafe_set_version_counter(self.parameters, self._versions)
        self._versions = ()

    def replaced(self) -> list[int]:
        """Positions of the parameters whose `.data` the user has replaced."""
        self._places = self._places or _places_of(self._own_data)
        with direct_access():
            places = _places_of(self.parameters)
        if places == self._places:  # the usual case, which is looked for several times in a step
            return []
        pairs = zip(zip(*places, strict=True), zip(*self._places, strict=True), strict=True)
        return [position for position, (now, before) in enumerate(pairs) if now != before]

    @property
    def _own_data(self) -> Sequence[Tensor]:
        """What `.data` of the parameters is, unless the user has replaced it."""
        return self._placeholder if self.is_detached else self._views

    def can_adopt(self, position: int) -> bool:
        """Whether the data of a parameter can be copied to the parameter's place."""
        parameter, own = self.parameters[position], self._own_data[position]
        compatible = parameter.dtype is self.dtype and parameter.device == self.device
        return not self.is_detached and compatible and parameter.shape == own.shape

    def replacement(self, position: int) -> Tensor:
        """The data with which the user has replaced that of a parameter.

        Raises:
            RuntimeError: it cannot be copied to the parameter's place.
        """
        parameter = self.parameters[position]
        if not self.can_adopt(position):
            raise RuntimeError(
                f"the data of parameter {self.names[position]!r} was replaced by a tensor of "
                f"shape {tuple(parameter.shape)}, {parameter.dtype} on {parameter.device}; "
                "write into it (p.data.copy_, load_state_dict), at stage 3 inside "
                "full_parameters(writeback=True), or convert the model before the optimizer"
            )
        return parameter.data

    def has_memory_of(self, data: Tensor) -> bool:
        """Whether a tensor on this device is a part of `values`."""
        start = self.values.data_ptr()
        return start <= data.data_ptr() < start + self.values.nbytes

    def adopt(self, position: int, data: Tensor) -> None:
        """Copy values to the place of a parameter, and make it a view of that place again."""
        self._views[position].copy_(data)
        self.parameters[position].data = self._views[position]

    @property
    def shard_is_writable(self) -> bool:
        """Whether writing into the user's parameters changes `shard`, of which they are views."""
        shard, values = self.shard.untyped_storage(), self.values.untyped_storage()
        return shard.data_ptr() == values.data_ptr()

    @property
    def is_detached(self) -> bool:
        """Whether the user's parameters are not views of `values` now."""
        return bool(self._versions)

    def detach_parameters(self) -> None:
        """Give the user's parameters their shape and NaN for every value: see `absent_parameter`.

        The version counters change, so autograd rejects a backward that reads saved parameters
        before they are attached again.
        """
        if not self._versions:
            self._versions = tuple(parameter._version for parameter in self.parameters)
            torch.autograd.graph.increment_version(self.parameters)
        self._classes = self._classes or [classes_of(p) for p in self.parameters]
        parts = zip(self.parameters, self._placeholder, self._classes, strict=True)
        for parameter, placeholder, (present, absent) in parts:
            parameter.__class__ = present
            parameter.data = placeholder
            parameter.__class__ = absent
        self._places = ()

    def mark_updated(self, unused: Collection[int]) -> None:
        """Let autograd reject graphs from before an update of all parameters but these positions.

        The update writes to `values`, so the version counters of the parameters do not change. The
        device may skip the update (`found_inf`). The host does not know yet, so graphs from before
        it are rejected, too.
        """
        if self.is_detached:
            numbered = enumerate(self._versions)
            self._versions = tuple(old + (at not in unused) for at, old in numbered)
            return
        used: Sequence[nn.Parameter] = self.parameters
        if unused:
            used = [parameter for at, parameter in enumerate(used) if at not in unused]
        torch.autograd.graph.increment_version(used)

    def take_gradients(self, weight: float) -> tuple[list[Tensor], list[int]]:
        """Take the gradients from the parameters, with their offsets, and set `.grad` to None.

        With weight 0 no gradient is returned, so NaN has no effect, but its parameter counts as
        used.
        """
        gradients, offsets = [], []
        with direct_access():
            arrived = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
        for position, gradient in enumerate(arrived):
            if gradient is None:
                continue
            self.used.add(position)
            if weight != 0.0:
                gradients.append(gradient)
                offsets.append(self.offsets[position])
        return gradients, offsets

    def span(self, position: int) -> tuple[int, int]:
        """Start and end of one parameter in the buffer, including its padding."""
        end = self.offsets[position + 1] if position + 1 < len(self.offsets) else self.numel
        return self.offsets[position], end

    def owned_range(self, position: int) -> tuple[int, int]:
        """Start and end of the owned elements of one parameter, counted from its first element."""
        offset, numel = self.offsets[position], self.parameters[position].numel()
        low, high = (min(max(bound - offset, 0), numel) for bound in self.owned)
        return low, high

    def owned_part(self, position: int) -> slice | None:
        """Of one parameter, the owned elements, relative to the owned part; None if empty."""
        offset = self.offsets[position]
        return self.intersect_owned(offset, offset + self.parameters[position].numel())

    def intersect_owned(self, start: int, stop: int) -> slice | None:
        """The part of `[start, stop)` that is owned, relative to the owned part; None if empty."""
        low, high = max(start, self.owned[0]), min(stop, self.owned[1])
        return slice(low - self.owned[0], high - self.owned[0]) if low < high else None


def adopt_data(replaced: Sequence[tuple[FlatParameter, int]]) -> None:
    """Copy data that the user has assigned to `.data` and make these parameters views again.

    Args:
        replaced: all `FlatParameter.replaced` of the flat parameters that may be overwritten.

    Raises:
        RuntimeError: as `FlatParameter.replacement`; then nothing is copied.
    """
    given = [flat.replacement(position) for flat, position in replaced]
    flats = dict.fromkeys(flat for flat, _ in replaced)
    # Before any is overwritten: the user may have exchanged the data of parameters.
    kept = [
        data.clone() if any(flat.has_memory_of(data) for flat in flats) else data for data in given
    ]
    for (flat, position), data in zip(replaced, kept, strict=True):
        flat.adopt(position, data)


def layout_on_rank(flat: FlatParameter, rank: int, world_size: int) -> Layout:
    """The layout in which `rank` owns the whole flat parameter."""
    return Layout(tuple(0 if other <= rank else flat.numel for other in range(world_size + 1)))


def _places_of(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Where tensors have their elements: 0.3 us for each. Reading the shape would take longer."""
    return (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        [tensor.numel() for tensor in tensors],
    )


def aligned_offsets(numels: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Where parts of these sizes begin in a buffer, and the size of the buffer."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), end

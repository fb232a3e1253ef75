"""The sharded update: the user's optimizer class on the slices that this rank owns.

[Note: runs]
The tensors of the inner optimizer are runs: ranges of a flat parameter whose parameters share a
param group and were used in the same steps. A parameter that no rank used in a step must not decay,
and its step counter must not change, so its run is skipped. A partly used run is split, with its
state. Runs have the same boundaries on every rank, owned or not, so that state can be resharded.

[Note: host state]
A flat parameter may be hosted on this rank: its master and the state of its runs are in host
memory, and the host updates them. The gradients and the low-precision values are copied to the
host first. Meanwhile the device updates its own runs. Then the host updates one flat parameter
after the other and copies its low-precision values back. AdamW gives the same bits on the host.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from poplar.zero.flat_adamw import FlatAdamW, can_round_to
from poplar.zero.flat_parameter import FlatParameter

OptimizerFactory = Callable[..., torch.optim.Optimizer]


class Copies(Protocol):
    """Copies of tensors in host memory."""

    def wait(self) -> list[Tensor]:
        """Wait until they are complete."""
        ...


ToHost = Callable[[Sequence[Tensor]], Copies]
"""Starts to copy tensors; those that are in host memory are their own copies."""


class Flag(Protocol):
    """What the device decides."""

    def read(self) -> bool:
        """Wait until it has."""
        ...


StateLayout = Mapping[str, tuple[bool, Any]]
"""By name of a state value, whether it has one value per element, and what it is at first."""
_PIECE = 1 << 22
"""Elements that `refresh` compares at once, which limits its temporary memory."""
_FUSED = (FlatAdamW, torch.optim.Adagrad, torch.optim.Adam, torch.optim.SGD)
_FUSED_STEPS = {inspect.unwrap(cls.step) for cls in _FUSED}  # torch wraps `step` at its first use


@dataclass(eq=False)
class ParameterRun:
    """Parameters `[first, last)` of a flat parameter, updated as one tensor."""

    flat: FlatParameter
    group: int
    first: int
    last: int
    tensor: Tensor | None = None
    """fp32 view of the owned part; None if this rank owns nothing of the run."""
    owned: slice | None = None
    """The owned part, relative to the owned part of the flat parameter; None if it is empty."""

    @property
    def start(self) -> int:
        return self.flat.span(self.first)[0]

    @property
    def stop(self) -> int:
        return self.flat.span(self.last - 1)[1]

    @property
    def first_owned(self) -> int:
        """The element of the flat parameter at which `tensor` and state of its shape begin."""
        return max(self.start, self.flat.owned[0])

    def bind(self) -> None:
        """Set `owned` and `tensor` by the current layout and master of the flat parameter."""
        self.owned = self.flat.intersect_owned(self.start, self.stop)
        self.tensor = None if self.owned is None else self.flat.master[self.owned]


class Fetched(NamedTuple):
    """What the update of a flat parameter reads and writes, where its state is."""

    gradient: Tensor
    shard: Tensor


class ShardedUpdate:
    """The inner optimizer and its runs."""

    def __init__(
        self,
        factory: OptimizerFactory,
        flats: Sequence[FlatParameter],
        groups: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        to_host: ToHost,
    ) -> None:
        """
        Args:
            factory: the user's optimizer class.
            groups: hyper-parameters of each param group, without its parameters.
            options: keyword arguments of the class.
            to_host: for flat parameters that are hosted.
        """
        self._factory, self._options = factory, dict(options)
        self._to_host = to_host
        self.collected: dict[str, Any] | None = None
        """The whole state as a state dict, if it was collected here since it last changed."""
        self.updates = 0
        """Updates that have been applied, or skipped on all ranks, since state was loaded."""
        self._undecided: Flag | None = None
        """Whether the device has skipped the last step, until that is read."""
        self._state_layouts: dict[int, StateLayout] = {}
        """By param group, until its settings may have changed."""
        self._unstarted: set[Tensor] = set()
        """Tensors whose state `create_state` made, which their first update makes again."""
        self.runs = [
            run for flat in flats for run in adjacent_runs(flat, [None] * len(flat.groups))
        ]
        inner_groups = [
            {**group, "params": [run.tensor for run in self.runs if _in_group(run, index)]}
            for index, group in enumerate(groups)
        ]
        self.inner = factory(inner_groups, **options)

    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        unused: Mapping[FlatParameter, set[int]],
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update the masters with `scale` times the mean gradient, then the low-precision values.

        Args:
            groups: the outer param groups; their hyper-parameters are used.
            unused: positions of the parameters that no rank used in this step.
            scale: one element on the device; None for 1. See [Note: device scalars].
            found_inf: one element on the device. If it is not 0, nothing changes; call
                `undo_if` afterwards.
        """
        self.settle()
        self.collected = None
        self.use_settings(groups)
        self._drop_unstarted_state()
        self._split_partly_used_runs(unused)
        runs = [run for run in self.runs if run.tensor is not None]
        used = [run for run in runs if run.first not in unused.get(run.flat, ())]
        hosted = dict.fromkeys(run.flat for run in used if run.flat.is_hosted)
        given = [] if not hosted else [one for one in (scale, found_inf) if one is not None]
        scalars = self._to_host(given) if given else None
        fetched = [(flat, self._to_host([flat.gradient, flat.shard])) for flat in hosted]
        self._update_runs([run for run in used if not run.flat.is_hosted], scale, found_inf)
        if scalars is not None:
            on_host = iter(scalars.wait())
            scale, found_inf = (one if one is None else next(on_host) for one in (scale, found_inf))
        for flat, copies in fetched:
            copied = Fetched(*copies.wait())
            own = [run for run in used if run.flat is flat]
            self._update_runs(own, scale, found_inf, copied)
            flat.shard.copy_(copied.shard, non_blocking=True)
        self.updates += 1

    def _update_runs(
        self,
        runs: Sequence[ParameterRun],
        scale: Tensor | None,
        found_inf: Tensor | None,
        fetched: Fetched | None = None,
    ) -> None:
        """As `step`, for runs whose state is on the device or, if `fetched`, on the host."""
        stepped = {}
        for run in runs:
            source = fetched or run.flat
            assert run.tensor is not None
            assert run.owned is not None
            run.tensor.grad = _part(source.gradient, run.owned)
            low = _part(source.shard, run.owned) if _has_low_precision(run.flat) else None
            stepped[run.tensor] = low
            if not self.has_exact_kernel:  # which does so itself
                self.take_written_values(run.flat, run.start, run.stop)
        written = self._step_inner(stepped, scale, found_inf)
        for tensor, low in stepped.items():
            tensor.grad = None
            if low is not None and tensor not in written:
                low.copy_(tensor)

    def use_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the hyper-parameters of the outer param groups."""
        for mine, theirs in zip(self.inner.param_groups, groups, strict=True):
            for key, value in theirs.items():
                chosen_here = key == "fused" and value is None
                if key not in ("params", "param_names") and not chosen_here:
                    mine[key] = value
        self._state_layouts.clear()

    def copy_new_settings(self, groups: Sequence[dict[str, Any]]) -> None:
        """Add to the outer param groups the keys that the class has added to its own in a step."""
        for mine, theirs in zip(self.inner.param_groups, groups, strict=True):
            for key in mine.keys() - theirs.keys():
                theirs[key] = mine[key]

    def allocate_state(self) -> None:
        """Allocate what the next update is certain to need, before the ranks agree to apply it.

        A rank that is out of memory then fails together with the others. Runs that this rank has
        used in part may be split or skipped, so their state is allocated in the update.
        """
        self._drop_unstarted_state()
        if not isinstance(self.inner, FlatAdamW) or not self.inner.uses_operator():
            return
        for run in self.runs:
            if run.tensor is None or self.inner.state.get(run.tensor):
                continue
            if run.flat.used.issuperset(range(run.first, run.last)):
                self.inner.allocate_state(run.tensor)

    @property
    def has_exact_kernel(self) -> bool:
        """Whether the update is Poplar's own, which rounds alike on all devices."""
        return isinstance(self.inner, FlatAdamW) and self.inner.uses_operator()

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` leaves out a step without the host reading `found_inf`."""
        return self.has_exact_kernel or _takes_scalars(self.inner)

    def keep_collected(self, state: dict[str, Any] | None) -> None:
        """Keep the whole state that was collected on this rank, until it changes."""
        self.collected = state

    def undo_if(self, skipped: Flag) -> None:
        """The last step does not count if the flag is set. It is read before the state is."""
        self._undecided = skipped

    def settle(self) -> None:
        """Read whether the last step was skipped, if the device has decided it. Local."""
        flag, self._undecided = self._undecided, None
        skipped = flag is not None and flag.read()
        if isinstance(self.inner, FlatAdamW):
            self.inner.settle_step_count(skipped=skipped)

    def _step_inner(
        self,
        tensors: Mapping[Tensor, Tensor | None],
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> Mapping[Tensor, Tensor]:
        """Step the tensors in the fastest way; returns the low-precision copies it has written.

        [Note: device scalars]
        Poplar's AdamW and torch's fused optimizers apply a scale and skip a step on the device, so
        neither needs a pass over the gradients or a synchronization. (torch divides by the scale,
        which rounds once more than a product.) For other classes, including subclasses with their
        own `step`, the gradients are scaled first and the host reads the scalars.
        """
        inner = self.inner
        factor = None if scale is None else scale.float()
        if isinstance(inner, FlatAdamW) and inner.uses_operator():
            written = {
                tensor: low
                for tensor, low in tensors.items()
                if low is not None and can_round_to(low.dtype)
            }
            inner.step_scaled(factor, found_inf, written)
            return written
        takes_scalars, starting = _takes_scalars(inner), _starting_momentum(inner)
        if not takes_scalars or starting:
            if found_inf is not None and bool(found_inf):
                return {}
            found_inf = None
        if takes_scalars:
            with _amp_scalars(inner, factor, found_inf):
                _step_fused(inner, tensors, starting)
        else:
            if factor is not None and float(factor) != 1.0:
                for tensor in tensors:
                    assert tensor.grad is not None
                    tensor.grad.mul_(factor)
            inner.step()
        return {}

    def nonfinite_parameter(self) -> str | None:
        """The first parameter with a value of this rank's part that is not finite; None: none.

        It reads the masters once and synchronizes with the device.
        """
        parts = [
            (name, flat.master[part])
            for flat in dict.fromkeys(run.flat for run in self.runs)
            for position, name in enumerate(flat.names)
            if (part := flat.intersect_owned(*flat.span(position))) is not None
        ]
        if not parts:
            return None
        largest = torch._foreach_norm([values for _, values in parts], math.inf)
        device = self.runs[0].flat.device
        finite = torch.stack([norm.to(device) for norm in largest]).isfinite().tolist()
        return next(
            (name for (name, _), is_finite in zip(parts, finite, strict=True) if not is_finite),
            None,
        )

    def refresh(self, flat: FlatParameter, start: int = 0, stop: int | None = None) -> None:
        """Copy changed values of `flat.shard` to the masters; unchanged masters stay exact.

        Args:
            flat: the flat parameter.
            start: first element of the buffer that may have changed.
            stop: the element after the last one; default: the end.
        """
        if flat.master is flat.shard or not flat.trained:
            return
        part = flat.intersect_owned(start, flat.numel if stop is None else stop)
        if part is None:
            return
        master, values = flat.master[part], flat.shard[part]
        for piece, part_of_shard in zip(master.split(_PIECE), values.split(_PIECE), strict=True):
            low = part_of_shard.to(piece.device)
            torch.where(piece.to(low.dtype) == low, piece, low, out=piece)

    def take_written_values(
        self, flat: FlatParameter, start: int = 0, stop: int | None = None
    ) -> None:
        """As `refresh`, for values that the user has written in place; before masters are read.

        [Note: written values]
        Parameters are views of the low-precision values. A write to them, also through `.data`, has
        no trace but its values: they are not the rounded masters any more. So the update begins
        with the low-precision values where that is so. Poplar's AdamW compares them in its kernel.
        """
        if flat.shard_is_writable:
            self.refresh(flat, start, stop)

    def adopt_replaced_data(self, flats: Sequence[FlatParameter]) -> None:
        """Take over values that the user has assigned to `.data` of parameters."""
        for flat in flats:
            if flat.adopt_replaced_data():
                self.refresh(flat)

    def state_layout(self, group: int, settings: Mapping[str, Any] | None = None) -> StateLayout:
        """What the state of a run in a param group consists of, found by a step of a probe.

        Args:
            group: index of the param group.
            settings: hyper-parameters that replace those of the group.
        """
        if settings is None and group in self._state_layouts:
            return self._state_layouts[group]
        probe = torch.zeros(2, dtype=torch.float32, device=self.runs[0].flat.device)
        probe.grad = torch.zeros_like(probe)
        merged = {**self.inner.param_groups[group], **(settings or {}), "params": [probe]}
        optimizer = self._factory([merged], **self._options)
        optimizer.step()
        state = dict(optimizer.state.get(probe, {}))
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()
        layout = {key: (is_elementwise(value, probe), value) for key, value in state.items()}
        if settings is None:
            self._state_layouts[group] = layout
        return layout

    def reset_state(self) -> None:
        """Drop the state; the next update creates it as the first one does."""
        self.collected = None
        self.settle()
        self.inner.state.clear()
        self._unstarted.clear()

    def create_state(self) -> None:
        """Create the state that is missing because there was no update, to load into it.

        The first update creates it again if nothing was loaded, because for some classes it is not
        what a new optimizer has.
        """
        for run in self.runs:
            if run.tensor is None or self._has_state(run.tensor):
                continue
            state = {
                key: torch.full_like(run.tensor, value[0].item(), dtype=value.dtype)
                if elementwise
                else copy_value(value)
                for key, (elementwise, value) in self.state_layout(run.group).items()
            }
            self._set_state(run, state)
            self._unstarted.add(run.tensor)

    def _set_state(self, run: ParameterRun, state: dict[str, Any]) -> None:
        """Set the state of a run; put what is not by element where the class expects it.

        That is beside the tensor, or in the memory that the class always uses.
        """
        assert run.tensor is not None
        layout = self.state_layout(run.group)
        for key, value in state.items():
            if isinstance(value, Tensor) and not is_elementwise(value, run.tensor):
                usual = layout[key][1].device
                beside = usual == run.flat.device
                state[key] = value.to(run.tensor.device if beside else usual)
        self.inner.state[run.tensor] = state

    def _has_state(self, tensor: Tensor) -> bool:
        return tensor in self._unstarted or bool(self.inner.state.get(tensor))

    def _drop_unstarted_state(self) -> None:
        for tensor in self._unstarted:
            self.inner.state.pop(tensor, None)
        self._unstarted.clear()

    def replace_runs(
        self,
        flat: FlatParameter,
        runs: Sequence[ParameterRun],
        states: Mapping[ParameterRun, dict[str, Any]],
    ) -> None:
        """Load other runs of `flat`, which are bound, and their state."""
        self.collected, self.updates = None, 0
        for run in self.runs:
            if run.flat is flat and run.tensor is not None:
                self.inner.state.pop(run.tensor, None)
                self._unstarted.discard(run.tensor)
        first = next(place for place, run in enumerate(self.runs) if run.flat is flat)
        others = [run for run in self.runs if run.flat is not flat]
        self.runs = [*others[:first], *runs, *others[first:]]
        for run in runs:
            if run.tensor is not None and states.get(run):
                self._set_state(run, states[run])
        self._update_param_groups()

    def rebind(self, flat: FlatParameter, states: Mapping[ParameterRun, dict[str, Any]]) -> None:
        """After a layout change: create new views for the runs of `flat`, with the given state."""
        for run in self.runs:
            if run.flat is not flat:
                continue
            if run.tensor is not None:
                self.inner.state.pop(run.tensor, None)
                self._unstarted.discard(run.tensor)
            run.bind()
            if run.tensor is not None and states.get(run):
                self._set_state(run, states[run])
        self._update_param_groups()

    def state_of(self, run: ParameterRun) -> dict[str, Any]:
        """State tensors of the owned part and scalars of a run; empty before its first update."""
        self.settle()
        if run.tensor is None or run.tensor in self._unstarted:
            return {}
        return dict(self.inner.state.get(run.tensor, {}))

    def created_state_of(self, run: ParameterRun) -> dict[str, Any]:
        """As `state_of`, but also before the first update, if this rank owns a part of the run."""
        if run.tensor is None:
            return {}
        self.settle()
        if not self._has_state(run.tensor):
            self.create_state()
        return dict(self.inner.state[run.tensor])

    def _split_partly_used_runs(self, unused: Mapping[FlatParameter, set[int]]) -> None:
        if not any(unused.values()):
            return
        whole, self.runs = self.runs, []
        for run in whole:
            idle = unused.get(run.flat, set())
            cuts = [run.first]
            for position in range(run.first + 1, run.last):
                if (position in idle) != (position - 1 in idle):
                    cuts.append(position)
            parts = [
                ParameterRun(run.flat, run.group, first, last)
                for first, last in zip(cuts, [*cuts[1:], run.last], strict=True)
            ]
            self.runs += [run] if len(parts) == 1 else parts
            if len(parts) > 1:
                self._split_state(run, parts)
        if len(self.runs) != len(whole):
            self._update_param_groups()

    def _split_state(self, run: ParameterRun, parts: Sequence[ParameterRun]) -> None:
        if run.tensor is None:
            return
        state = self.state_of(run)
        whole = run.tensor
        self.inner.state.pop(whole, None)
        base = run.owned
        assert base is not None
        for part in parts:
            part.bind()
            owned = part.owned
            if part.tensor is None or owned is None:
                continue
            if state:
                local = slice(owned.start - base.start, owned.stop - base.start)
                self.inner.state[part.tensor] = {
                    key: _slice_state(value, whole, local) for key, value in state.items()
                }

    def _update_param_groups(self) -> None:
        """Set the tensors of the inner optimizer's param groups."""
        for index, group in enumerate(self.inner.param_groups):
            group["params"] = [run.tensor for run in self.runs if _in_group(run, index)]


def copy_value(value: Any) -> Any:
    """A copy of a tensor, or any other value itself."""
    return value.clone() if isinstance(value, Tensor) else value


def is_elementwise(value: Any, like: Tensor | None) -> bool:
    """Whether a state value has one entry per element."""
    return isinstance(value, Tensor) and like is not None and value.shape == like.shape


def fastest_options(factory: OptimizerFactory, options: Mapping[str, Any]) -> dict[str, Any]:
    """Add `fused=True` if the class supports it and the user chose no implementation."""
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return dict(options)
    choices = ("fused", "foreach", "capturable", "differentiable")
    if "fused" not in known or any(options.get(choice) is not None for choice in choices):
        return dict(options)
    return {**options, "fused": True}


def check_elementwise(
    factory: OptimizerFactory, options: Mapping[str, Any], device: torch.device
) -> str | None:
    """Test whether ranks can update parts of a parameter, each with an optimizer of its own.

    It compares three steps on one matrix with three steps on two flat parts of it, which have
    nothing in common. The parts are large enough for classes that quantize the state of large
    tensors only.

    Returns:
        Why the class cannot update flat shards, or None if it can.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    start = torch.randn(128, 96, generator=generator, device="cpu")
    gradients = [torch.randn(128, 96, generator=generator, device="cpu") for _ in range(3)]
    problems: list[str] = []

    def after(shape: Callable[[Tensor], Tensor]) -> Tensor:
        values = shape(start).clone().to(device)
        optimizer = factory([{"params": [values]}], **options)
        settings = [_settings(optimizer)]
        for gradient in gradients:
            values.grad = shape(gradient).clone().to(device)
            optimizer.step()
            settings.append(_settings(optimizer))
        problems.extend(_changed_settings(settings))
        problems.extend(_unsupported_state(optimizer.state.get(values, {}), values))
        return values.flatten().cpu()

    # Wrong options raise here, with the message of the class itself.
    factory([{"params": [start.clone().to(device)]}], **options)
    try:
        whole = after(lambda values: values)
        cut = [after(lambda v: v.flatten()[:6000]), after(lambda v: v.flatten()[6000:])]
    except Exception as error:
        return f"it does not step a flat slice of a parameter ({type(error).__name__}: {error})"
    if not torch.allclose(whole, torch.cat(cut), rtol=1e-5, atol=1e-6, equal_nan=True):
        problems.append("its update of an element depends on other elements")
    return problems[0] if problems else None


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The settings of the first param group, as text."""
    group = optimizer.param_groups[0]
    return {key: repr(value) for key, value in group.items() if key != "params"}


def _changed_settings(by_step: Sequence[Mapping[str, str]]) -> list[str]:
    """What is wrong if `step` changes the settings, which are the same on all ranks."""
    before, first, last = by_step[0], by_step[1], by_step[-1]
    changed = sorted(key for key in last if last[key] != before.get(key, first.get(key)))
    if not changed:
        return []
    return [f"its step() keeps state in the param group ({', '.join(changed)})"]


def _unsupported_state(state: Mapping[str, Any], values: Tensor) -> list[str]:
    """What is wrong with state that cannot be cut and moved with the elements."""
    for key, value in state.items():
        if not isinstance(value, Tensor) or (value.numel() == 1 and type(value) is Tensor):
            continue
        plain = type(value) is Tensor and value.is_floating_point()
        if not plain or value.shape != values.shape:
            return [
                f"its state {key!r} is a {type(value).__name__} of {value.dtype} and shape "
                f"{tuple(value.shape)}, not one floating-point number per element"
            ]
    return []


def adjacent_runs(flat: FlatParameter, keys: Sequence[Any]) -> list[ParameterRun]:
    """Adjacent parameters with the same param group and key are one run; they are bound.

    Args:
        keys: by position in `flat`, a value that is compared.
    """
    kinds = list(zip(flat.groups, keys, strict=True))
    starts = [at for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]
    runs = [
        ParameterRun(flat, flat.groups[first], first, last)
        for first, last in zip(starts, [*starts[1:], len(kinds)], strict=True)
    ]
    for run in runs:
        run.bind()
    return runs


def _takes_scalars(inner: torch.optim.Optimizer) -> bool:
    """Whether `step` is torch's own fused step, which accepts `grad_scale` and `found_inf`."""
    fused = all(group.get("fused") for group in inner.param_groups)
    return fused and inspect.unwrap(type(inner).step) in _FUSED_STEPS


def _starting_momentum(inner: torch.optim.Optimizer) -> set[Tensor]:
    """The tensors whose momentum begins with this step.

    torch's fused SGD allocates it and relies on the step to write it, so a skipped step would leave
    uninitialized memory.
    """
    return {
        tensor
        for group in inner.param_groups
        for tensor in group["params"]
        if group.get("momentum") and tensor.grad is not None and not inner.state.get(tensor)
    }


def _step_fused(
    inner: torch.optim.Optimizer, tensors: Iterable[Tensor], starting: set[Tensor]
) -> None:
    """Step tensors whose momentum begins apart from the others, as torch's fused SGD needs it."""
    gradients = {tensor: tensor.grad for tensor in tensors}
    for part in filter(None, (starting, gradients.keys() - starting)):
        for tensor, gradient in gradients.items():
            tensor.grad = gradient if tensor in part else None
        inner.step()


@contextmanager
def _amp_scalars(
    inner: torch.optim.Optimizer, factor: Tensor | None, found_inf: Tensor | None
) -> Iterator[None]:
    """Pass the scalars to a fused optimizer of torch, as `torch.amp.GradScaler` does."""
    given = {"grad_scale": None if factor is None else factor.reciprocal(), "found_inf": found_inf}
    vars(inner).update(given)
    try:
        yield
    finally:
        for name in given:
            vars(inner).pop(name, None)


def _has_low_precision(flat: FlatParameter) -> bool:
    """Whether low-precision values exist beside the masters."""
    return flat.shard is not flat.master


def _part(buffer: Tensor, part: slice) -> Tensor:
    """`buffer[part]`, without a new view if that is the whole buffer."""
    return buffer if part.stop - part.start == buffer.numel() else buffer[part]


def _in_group(run: ParameterRun, group: int) -> bool:
    return run.group == group and run.tensor is not None


def _slice_state(value: Any, like: Tensor, part: slice) -> Any:
    if is_elementwise(value, like):
        return value[part].clone()
    return copy_value(value)

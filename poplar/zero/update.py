"""The sharded update: the user's optimizer class on the slices that this rank owns.

[Note: runs]
The tensors of the inner optimizer are runs: ranges of a flat parameter whose parameters share a
param group and were used in the same steps. A parameter that no rank used in a step must not decay,
and its step counter must not change, so its run is skipped. A partly used run is split, with its
state. Runs have the same boundaries on every rank, owned or not, so that state can be resharded.
Where a class needs blocks or whole tensors, each parameter is a run of its own; its tensor has the
shape of the parameter if this rank owns all of it.

[Note: host state]
A flat parameter may be hosted on this rank: its master and the state of its runs are in host
memory, and the host updates them. The gradients and the low-precision values are copied to the
host first. Meanwhile the device updates its own runs. Then the host updates one flat parameter
after the other and copies its low-precision values back. AdamW gives the same bits on the host.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from poplar.zero.flat_parameter import FlatParameter, adopt_data
from poplar.zero.optimizers.flat_adamw import FlatAdamW
from poplar.zero.optimizers.optimizer_class import OptimizerClass
from poplar.zero.optimizers.state_values import StateLayouts, copy_value, fill_state, taken_apart
from poplar.zero.steps.step_settings import settings_in
from poplar.zero.streams import HostCopies

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
        if self.is_separate:
            return self.start + self.flat.parameters[self.first].numel()
        return self.flat.span(self.last - 1)[1]

    @property
    def is_separate(self) -> bool:
        """It is one parameter, whose class needs blocks of it or all of it."""
        return self.flat.separate[self.first]

    @property
    def first_owned(self) -> int:
        """The element of the flat parameter at which `tensor` and its state begin."""
        return max(self.start, self.flat.owned[0])

    def bind(self) -> None:
        """Set `owned` and `tensor` by the current layout and master of the flat parameter."""
        self.owned = self.flat.intersect_owned(self.start, self.stop)
        self.tensor = None
        if self.owned is not None:
            shape = self.shape_of(self.owned.stop - self.owned.start)
            self.tensor = self.flat.master[self.owned].view(shape)

    def unbind(self) -> None:
        """Drop the view of the master, whose memory another flat parameter replaces."""
        self.owned = self.tensor = None

    def shape_of(self, numel: int) -> Sequence[int]:
        """The shape of the tensor if so many elements are owned."""
        whole = self.is_separate and numel == self.stop - self.start
        return self.flat.parameters[self.first].shape if whole else (numel,)

    def part(self, buffer: Tensor) -> Tensor:
        """What belongs to `tensor` in a buffer of the flat parameter's owned part, in its shape."""
        assert self.owned is not None
        assert self.tensor is not None
        found, shape = _part(buffer, self.owned), self.tensor.shape
        return found if found.shape == shape else found.view(shape)


StateOf = Callable[[ParameterRun], dict[str, Any] | None]
"""The state of a run; empty or None: it has none."""


class Fetched(NamedTuple):
    """What the update of a flat parameter reads and writes, where its state is."""

    gradient: Tensor
    shard: Tensor


class ShardedUpdate:
    """The inner optimizer and its runs."""

    def __init__(
        self,
        classes: Sequence[OptimizerClass],
        flats: Sequence[FlatParameter],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """`classes` and `groups` (hyper-parameters) are by param group."""
        self._classes = tuple(classes)
        self.collected: dict[str, Any] | None = None
        """The whole state as a state dict, if it was collected here since it last changed."""
        self.updates = 0
        """Updates that have been applied, or skipped on all ranks, since state was loaded."""
        self.later_settings = ""
        """As `StepSettings.later_than`, of the last update."""
        self._undecided: HostCopies | None = None
        """Whether the device has skipped the last step, until that is read."""
        self._layouts: StateLayouts | None = None
        """Until the settings may have changed."""
        self._unstarted: set[Tensor] = set()
        """Tensors whose state `create_state` made, which their first update makes again."""
        self.runs = [
            run for flat in flats for run in adjacent_runs(flat, [None] * len(flat.groups))
        ]
        self._inners: list[torch.optim.Optimizer] = []
        """The optimizer of each param group; groups of one class share it."""
        self.param_groups: list[dict[str, Any]] = []
        """Those of the inner optimizers, in the order of the user's."""
        by_class: dict[OptimizerClass, torch.optim.Optimizer] = {}
        for cls in self._classes:
            if cls not in by_class:
                inside = [
                    {**group, "params": [run.tensor for run in self.runs if _in_group(run, index)]}
                    for index, group in enumerate(groups)
                    if self._classes[index] is cls
                ]
                by_class[cls] = cls.shard_factory(inside, **cls.options)
        unused = {cls: iter(inner.param_groups) for cls, inner in by_class.items()}
        for cls in self._classes:
            self._inners.append(by_class[cls])
            self.param_groups.append(next(unused[cls]))
        self.inners = tuple(by_class.values())
        """One optimizer per class."""

    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        unused: Mapping[FlatParameter, set[int]],
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        *,
        later: str = "",
        copy_to_host: Callable[[Sequence[Tensor]], HostCopies] | None = None,
    ) -> None:
        """Update the masters with `scale` times the mean gradient, then the low-precision values.

        Args:
            groups: the outer param groups; their hyper-parameters are used.
            unused: positions of the parameters that no rank used in this step.
            scale: one element on the device; None for 1. See [Note: device scalars].
            found_inf: one element on the device. If it is not 0, nothing changes; call
                `undo_if` afterwards.
            later: as `StepSettings.later_than`.
            copy_to_host: starts to copy tensors, if flat parameters are hosted.
        """
        self.settle()
        self.collected = None
        self.use_settings(groups)
        self._drop_unstarted_state()
        self._split_partly_used_runs(unused)
        runs = [run for run in self.runs if run.tensor is not None]
        for flat in dict.fromkeys(run.flat for run in runs):
            if flat.sends_differences:  # also of parameters that no rank has used
                self.take_written_values(flat)
        used = [run for run in runs if run.first not in unused.get(run.flat, ())]
        hosted = dict.fromkeys(run.flat for run in used if run.flat.is_hosted)
        fetched = []
        if hosted:
            assert copy_to_host is not None
            scalars = copy_to_host([one for one in (scale, found_inf) if one is not None])
            fetched = [(flat, copy_to_host([flat.gradient, flat.shard])) for flat in hosted]
        self._update_runs([run for run in used if not run.flat.is_hosted], scale, found_inf)
        if hosted:
            on_host = iter(scalars.wait())
            scale, found_inf = (one if one is None else next(on_host) for one in (scale, found_inf))
        for flat, copies in fetched:
            copied = Fetched(*copies.wait())
            own = [run for run in used if run.flat is flat]
            self._update_runs(own, scale, found_inf, copied)
            flat.shard.copy_(copied.shard, non_blocking=True)
        self.updates, self.later_settings = self.updates + 1, later

    def _update_runs(
        self,
        runs: Sequence[ParameterRun],
        scale: Tensor | None,
        found_inf: Tensor | None,
        fetched: Fetched | None = None,
    ) -> None:
        """As `step`, for runs whose state is on the device or, if `fetched`, on the host."""
        # A class may also change its settings in a step, so each steps on every rank.
        stepped: dict[torch.optim.Optimizer, dict[Tensor, Tensor | None]]
        stepped = {} if fetched else {inner: {} for inner in self.inners}
        for run in runs:
            source, inner = fetched or run.flat, self._inners[run.group]
            assert run.tensor is not None
            run.tensor.grad = run.part(source.gradient)
            is_written = run.flat.shard is not run.flat.master and not run.flat.sends_differences
            low = run.part(source.shard) if is_written else None
            stepped.setdefault(inner, {})[run.tensor] = low
            if not _has_exact_kernel(inner):  # which does so itself
                self.take_written_values(run.flat, run.start, run.stop)
        for inner, tensors in stepped.items():
            written = _step_inner(inner, tensors, scale, found_inf)
            for tensor, low in tensors.items():
                tensor.grad = None
                if low is not None and tensor not in written:
                    low.copy_(tensor)

    def use_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the hyper-parameters of the outer param groups."""
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            for key, value in settings_in(theirs).items():
                if key == "fused" and value is None:
                    continue  # it is chosen here
                if isinstance(mine.get(key), Tensor) and not isinstance(value, Tensor):
                    mine[key].fill_(value)  # as torchao keeps its learning rate
                else:
                    mine[key] = value
        self._layouts = None

    def copy_new_settings(self, groups: Sequence[dict[str, Any]]) -> None:
        """Add to the outer param groups the keys that the class has added to its own in a step."""
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            for key in mine.keys() - theirs.keys():
                theirs[key] = mine[key]

    def outer_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The user's param groups with all settings of their classes, as the classes keep them."""
        outer = []
        for cls, mine, theirs in zip(self._classes, self.param_groups, groups, strict=True):
            settings = {key: value for key, value in mine.items() if key != "params"}
            if cls.chose_fused:
                settings["fused"] = theirs.get("fused")
            outer.append({**theirs, **settings})
        return outer

    @property
    def name(self) -> str:
        """The names of the user's classes."""
        return "+".join(dict.fromkeys(cls.name for cls in self._classes))

    def defaults_of(self, group: int) -> dict[str, Any]:
        """The default settings of a param group's class."""
        return self._inners[group].defaults

    def allocate_state(self) -> None:
        """Allocate what the next update is certain to need, before the ranks agree to apply it.

        A rank that is out of memory then fails together with the others. Runs that this rank has
        used in part may be split or skipped, so their state is allocated in the update.
        """
        self._drop_unstarted_state()
        for run in self.runs:
            inner = self._inners[run.group]
            if run.tensor is None or not _has_exact_kernel(inner) or inner.state.get(run.tensor):
                continue
            if run.flat.used.issuperset(range(run.first, run.last)):
                inner.state_of(run.tensor)

    @property
    def has_exact_kernel(self) -> bool:
        """Whether the update is Poplar's own, which rounds alike on all devices."""
        return all(map(_has_exact_kernel, self.inners))

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` leaves out a step without the host reading `found_inf`."""
        return all(_has_exact_kernel(inner) or _takes_scalars(inner) for inner in self.inners)

    def state_tensors(self, *, hosted: bool) -> list[Tensor]:
        """All tensors of the state that is in host memory by a plan, or of all other state."""
        runs = [run for run in self.runs if run.flat.is_hosted is hosted]
        values = [v for run in runs for v in taken_apart(self.inner_state(run)).values()]
        return [value for value in values if isinstance(value, Tensor)]

    def drop_state(self) -> None:
        """Free the state, whose owner will not use it again."""
        for inner in self.inners:
            inner.state.clear()

    def keep_collected(self, state: dict[str, Any] | None) -> None:
        """Keep the whole state that was collected on this rank, until it changes."""
        self.collected = state

    def undo_if(self, skipped: HostCopies) -> None:
        """The last step does not count if the flag is set. It is read before the state is."""
        self._undecided = skipped

    def continue_after(self, updates: int, later_settings: str) -> None:
        """Take the number of updates, and what the last was taken with, from another rank."""
        self.updates, self.later_settings = updates, later_settings

    def settle(self) -> None:
        """Read whether the last step was skipped, if the device has decided it. Local."""
        flag, self._undecided = self._undecided, None
        skipped = flag is not None and bool(flag.wait()[0])
        for inner in self.inners:
            if isinstance(inner, FlatAdamW):
                inner.settle_step_count(skipped=skipped)

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
        return None if all(finite) else parts[finite.index(False)][0]

    def refresh(self, flat: FlatParameter, start: int = 0, stop: int | None = None) -> None:
        """Copy changed values of `flat.shard` to the masters; unchanged masters stay exact.

        `[start, stop)` are the elements of the buffer that may have changed; default: all.
        """
        if flat.master is flat.shard or not flat.trained:
            return
        part = flat.intersect_owned(start, flat.numel if stop is None else stop)
        if part is None:
            return
        master, values = flat.master[part], flat.shard[part]
        sent = None if flat.sent is None else flat.sent[part]
        if sent is not None and not sent.is_cuda and _have_same_bits(sent, values):
            return  # the usual case; on a device, the host would wait for the answer
        for begin in range(0, len(master), _PIECE):
            piece, low = (whole[begin : begin + _PIECE] for whole in (master, values))
            low = low.to(piece.device)
            is_known = piece.to(low.dtype) == low
            if sent is not None:
                is_known |= sent[begin : begin + _PIECE] == low
            torch.where(is_known, piece, low, out=piece)
        if sent is not None:
            sent.copy_(values)

    def take_written_values(
        self, flat: FlatParameter, start: int = 0, stop: int | None = None
    ) -> None:
        """As `refresh`, for values that the user has written in place; before masters are read.

        [Note: written values]
        Parameters are views of the low-precision values. A write to them, also through `.data`, has
        no trace but its values: they are not the rounded masters any more. So the update begins
        with the low-precision values where that is so. Poplar's AdamW compares them in its kernel.
        Where updates are sent as differences, the values of the last update are known, too.
        """
        if flat.shard_is_writable:
            self.refresh(flat, start, stop)

    def adopt_replaced_data(self, flats: Sequence[FlatParameter]) -> None:
        """As `adopt_data`, of all flat parameters: the data of one may be the place of another."""
        replaced = [(flat, position) for flat in flats for position in flat.replaced()]
        adopt_data(replaced)
        for flat in dict.fromkeys(flat for flat, _ in replaced):
            self.refresh(flat)

    @property
    def layouts(self) -> StateLayouts:
        """What the state consists of, with the settings of the last step."""
        if self._layouts is None:
            self._layouts = self.layouts_with([{}] * len(self.param_groups))
        return self._layouts

    def layouts_with(self, settings: Sequence[Mapping[str, Any]]) -> StateLayouts:
        """What the state consists of if these settings replace those of the param groups."""

        def probe(group: int, shape: Sequence[int], device: torch.device) -> dict[str, Any]:
            values = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
            values.grad = torch.zeros_like(values)
            cls = self._classes[group]
            merged = {**self.param_groups[group], **settings[group], "params": [values]}
            optimizer = cls.shard_factory([merged], **cls.options)
            optimizer.step()
            state = dict(optimizer.state.get(values, {}))
            if "step" in state:
                state["step"] = state["step"] * 0
            return state

        return StateLayouts(probe, self.runs[0].flat.device)

    def reset_state(self) -> None:
        """Drop the state; the next update creates it as the first one does."""
        self.collected = None
        self.settle()
        self.drop_state()
        self._unstarted.clear()

    def create_state(self) -> None:
        """Create the state that is missing because there was no update, to load into it.

        The first update creates it again if nothing was loaded, because for some classes it is not
        what a new optimizer has.
        """
        for run in self.runs:
            if run.tensor is None or self._has_state(run):
                continue
            state = self.layouts.new_state(run.flat, run.first, run.tensor.shape)
            self._set_state(run, state)
            self._unstarted.add(run.tensor)

    def new_state(
        self,
        run: ParameterRun,
        shape: Sequence[int],
        cut: Mapping[str, Tensor],
        others: Mapping[str, Any],
    ) -> dict[str, Any]:
        """A state of a part of the run with these values, where its master is.

        `cut` has, by name of `taken_apart`, what is cut with the run; `others` has all else.
        """
        if not run.is_separate:
            device = run.flat.master.device
            copies = {key: value.to(device, copy=True) for key, value in cut.items()}
            return {**copies, **{key: copy_value(value) for key, value in others.items()}}
        state = self.layouts.new_state(run.flat, run.first, shape)
        fill_state(state, cut, others)
        return state

    def _set_state(self, run: ParameterRun, state: dict[str, Any]) -> None:
        """Set the state of a run; put what is not by element where the class expects it.

        That is beside the tensor, or in the memory that the class always uses.
        """
        assert run.tensor is not None
        if not run.is_separate:  # else the class itself has made it
            layout = self.layouts.of(run.flat, run.first)
            for key, value in state.items():
                if isinstance(value, Tensor) and not is_elementwise(value, run.tensor):
                    usual = layout[key].example.device
                    beside = usual == run.flat.device
                    state[key] = value.to(run.tensor.device if beside else usual)
        self._inners[run.group].state[run.tensor] = state

    def _has_state(self, run: ParameterRun) -> bool:
        return run.tensor in self._unstarted or bool(self.inner_state(run))

    def _drop_unstarted_state(self) -> None:
        if not self._unstarted:
            return
        for run in self.runs:
            if run.tensor in self._unstarted:
                self._drop_state_of(run)

    def _drop_state_of(self, run: ParameterRun) -> None:
        if run.tensor is not None:
            self._inners[run.group].state.pop(run.tensor, None)
            self._unstarted.discard(run.tensor)

    def replace_runs(
        self,
        flat: FlatParameter,
        runs: Sequence[ParameterRun],
        state_of: StateOf,
    ) -> None:
        """Load other runs of `flat`, which are bound, and their state."""
        self.collected, self.updates, self.later_settings = None, 0, ""
        for run in self.runs:
            if run.flat is flat:
                self._drop_state_of(run)
        first = next(place for place, run in enumerate(self.runs) if run.flat is flat)
        others = [run for run in self.runs if run.flat is not flat]
        self.runs = [*others[:first], *runs, *others[first:]]
        self._set_states(runs, state_of)

    def add_runs(self, runs: Sequence[ParameterRun], state_of: StateOf) -> None:
        """Add runs of another flat parameter, which are bound, and their state."""
        self.collected = None
        self.runs = [*self.runs, *runs]
        self._set_states(runs, state_of)

    def rebind(self, flat: FlatParameter, state_of: StateOf) -> None:
        """After a layout change: create new views for the runs of `flat`, with the given state."""
        own = [run for run in self.runs if run.flat is flat]
        for run in own:
            self._drop_state_of(run)
            run.bind()
        self._set_states(own, state_of)

    def drop_runs(self, flat: FlatParameter) -> None:
        """Drop a flat parameter, whose runs other ones have replaced, and its state."""
        for run in self.runs:
            if run.flat is flat:
                self._drop_state_of(run)
                run.unbind()
        self.runs = [run for run in self.runs if run.flat is not flat]
        self._update_param_groups()

    def _set_states(self, runs: Sequence[ParameterRun], state_of: StateOf) -> None:
        for run in runs:
            if run.tensor is not None and (state := state_of(run)):
                self._set_state(run, state)
        self._update_param_groups()

    def inner_state(self, run: ParameterRun) -> dict[str, Any]:
        """The state of a run as its class keeps it; empty before its first update."""
        states: Mapping[Any, dict[str, Any]] = self._inners[run.group].state
        return dict(states.get(run.tensor, {}))

    def whole_shape(
        self, run: ParameterRun, position: int, key: str, value: Any
    ) -> torch.Size | None:
        """The shape that a state value of a run has for a whole parameter; None: it is not cut."""
        if run.is_separate:
            return self.layouts.of(run.flat, position)[key].shape
        return run.flat.parameters[position].shape if is_elementwise(value, run.tensor) else None

    def state_of(self, run: ParameterRun) -> dict[str, Any]:
        """State tensors of the owned part and scalars of a run; empty before its first update.

        Tensors that consist of others are taken apart.
        """
        self.settle()
        if run.tensor is None or run.tensor in self._unstarted:
            return {}
        return taken_apart(self.inner_state(run))

    def created_state_of(self, run: ParameterRun) -> dict[str, Any]:
        """As `inner_state`, but also before the first update, if this rank owns a part of it."""
        if run.tensor is None:
            return {}
        self.settle()
        if not self._has_state(run):
            self.create_state()
        return self.inner_state(run)

    def _split_partly_used_runs(self, unused: Mapping[FlatParameter, set[int]]) -> None:
        if not any(unused.values()):
            return
        whole, self.runs = self.runs, []
        for run in whole:
            idle = unused.get(run.flat, set())
            inside = range(run.first + 1, run.last)
            cuts = [at for at in inside if (at in idle) != (at - 1 in idle)]
            parts = [
                ParameterRun(run.flat, run.group, first, last)
                for first, last in pairwise([run.first, *cuts, run.last])
            ]
            self.runs += parts if cuts else [run]
            if cuts:
                self._split_state(run, parts)
        if len(self.runs) != len(whole):
            self._update_param_groups()

    def _split_state(self, run: ParameterRun, parts: Sequence[ParameterRun]) -> None:
        if run.tensor is None:
            return
        state = self.state_of(run)
        whole, states = run.tensor, self._inners[run.group].state
        states.pop(whole, None)
        base = run.owned
        assert base is not None
        for part in parts:
            part.bind()
            if state and part.tensor is not None and (owned := part.owned) is not None:
                local = slice(owned.start - base.start, owned.stop - base.start)
                states[part.tensor] = {
                    key: value[local].clone() if is_elementwise(value, whole) else copy_value(value)
                    for key, value in state.items()
                }

    def _update_param_groups(self) -> None:
        """Set the tensors of the inner optimizers' param groups."""
        for index, group in enumerate(self.param_groups):
            group["params"] = [run.tensor for run in self.runs if _in_group(run, index)]


def is_elementwise(value: Any, like: Tensor | None) -> bool:
    """Whether a state value has one entry per element."""
    return isinstance(value, Tensor) and like is not None and value.shape == like.shape


def adjacent_runs(flat: FlatParameter, keys: Sequence[Any]) -> list[ParameterRun]:
    """Adjacent parameters with the same param group and key are one run; they are bound.

    A parameter that is updated as a tensor of its own is a run. The keys are by position in `flat`.
    """
    alone = [position if separate else -1 for position, separate in enumerate(flat.separate)]
    kinds = list(zip(flat.groups, keys, alone, strict=True))
    starts = [at for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]
    runs = [
        ParameterRun(flat, flat.groups[first], first, last)
        for first, last in pairwise([*starts, len(kinds)])
    ]
    for run in runs:
        run.bind()
    return runs


def _step_inner(
    inner: torch.optim.Optimizer,
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
    factor = None if scale is None else scale.float()
    if _has_exact_kernel(inner):
        written = {tensor: low for tensor, low in tensors.items() if low is not None}
        inner.step_scaled(factor, found_inf, written)
        return written
    takes_scalars, starting = _takes_scalars(inner), _starting_momentum(inner)
    if not takes_scalars or starting:
        if found_inf is not None and bool(found_inf):
            return {}
        found_inf = None
    if takes_scalars:
        inverse = None if factor is None else factor.reciprocal()
        scalars = {"grad_scale": inverse, "found_inf": found_inf}
        vars(inner).update(scalars)  # as `torch.amp.GradScaler` does
        try:
            _step_fused(inner, tensors, starting)
        finally:
            for name in scalars:
                vars(inner).pop(name, None)
    else:
        if factor is not None and float(factor) != 1.0:
            for tensor in tensors:
                assert tensor.grad is not None
                tensor.grad.mul_(factor)
        inner.step()
    return {}


def _has_exact_kernel(inner: torch.optim.Optimizer) -> TypeGuard[FlatAdamW]:
    return isinstance(inner, FlatAdamW) and inner.uses_operator()


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


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors are equal, NaN included."""
    if one.numel() * one.itemsize % 8:
        return torch.equal(one, other)
    return torch.equal(one.view(torch.int64), other.view(torch.int64))


def _part(buffer: Tensor, part: slice) -> Tensor:
    """`buffer[part]`, without a new view if that is the whole buffer."""
    return buffer if part.stop - part.start == buffer.numel() else buffer[part]


def _in_group(run: ParameterRun, group: int) -> bool:
    return run.group == group and run.tensor is not None

"""`LoadedState`: an optimizer's state dict, checked against this optimizer before it is applied.

It takes this rank's `state_dict()`, the same from `torch.distributed.checkpoint`, and the state
dict of a plain optimizer, of which each rank takes the elements that it owns.

`master`, where a state dict has it, is the exact value of the parameter, also for an optimizer
that computes with it and has no masters beside its values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poplar.checkpoint.state_dicts.optimizer_state import MASTER
from poplar.checkpoint.state_dicts.place import (
    Place,
    check_held,
    elements_of,
    names_of,
    places_of,
)
from poplar.comm import Control
from poplar.values.canonical_name import canonical
from poplar.values.errors import agreed
from poplar.values.formatting import format_names
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.grad_scaler import GradScaler
from poplar.zero.optimizers.optimizer_class import IMPLEMENTATIONS
from poplar.zero.optimizers.state_values import StateLayout, taken_apart
from poplar.zero.update import ParameterRun, ShardedUpdate, adjacent_runs

Groups = Sequence[Mapping[str, Any]]

_OPTIONAL = IMPLEMENTATIONS | {"maximize", "decoupled_weight_decay"}
"""Options that state dicts of older versions of torch may lack."""
_NO_SETTINGS = {"params", "param_names"}


def load_state_dict(
    optimizer: torch.optim.Optimizer,
    engine: Engine,
    update: ShardedUpdate,
    state_dict: Mapping[str, Any],
    scaler: GradScaler | None,
    changing_values: Callable[[str], AbstractContextManager[None]],
) -> None:
    """Load a state dict on all ranks, or on none. Collective.

    Args:
        scaler: gets its state, if the state dict has it.
        changing_values: see `CollectiveCalls`.
    """
    control, doing = engine.control, "load_state_dict()"
    own: dict[str, Any] = {}  # what a plain optimizer does not have

    def check() -> LoadedState:
        given = dict(state_dict)
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            given = hook(optimizer, given) or given
        if not {"state", "param_groups"} <= given.keys():
            raise ValueError(
                f"an optimizer's state dict has 'state' and 'param_groups', got {list(given)}"
            )
        own.update(given.get("poplar", {}))
        state = given["state"]
        return LoadedState(
            optimizer, engine, update, given["param_groups"], lambda _, key, __: state.get(key, {})
        )

    loaded = run_on_all_ranks(control, check, doing=doing)
    loaded.agree(control)
    steps = _agreed_steps(control, own.get("steps"))

    def finish() -> None:
        if steps is not None:
            engine.strategy.continue_after(steps)
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)
        if scaler is not None and own.get("scaler") is not None:
            scaler.load_state_dict(own["scaler"])

    changing = f"{doing} after values had changed; load again before training"
    with changing_values(doing):
        run_on_all_ranks(control, loaded.apply, doing=changing)
        send_values(engine, loaded.changed)
        run_on_all_ranks(control, finish, doing=changing)


def send_values(engine: Engine, flats: Iterable[FlatParameter]) -> None:
    """Send the values that owners have loaded to the ranks that store all. Collective."""
    if engine.strategy.sends_updates:
        for flat in flats:
            what = f"loading {flat.name}"
            engine.comm.all_gather(flat.values, flat.layout, what=what).wait()


def _agreed_steps(control: Control, steps: int | None) -> int | None:
    """The steps by which compression is seeded, on all ranks alike; None: not saved. Collective."""
    by_rank = control.exchange_objects(steps, what="load_state_dict()")
    if any(other != by_rank[0] for other in by_rank):
        raise agreed(
            ValueError(
                f"the ranks loaded states of different steps: {control.group.by_name(by_rank)} by "
                "rank; load the same checkpoint on all ranks"
            )
        )
    return steps


@dataclass(frozen=True)
class ParameterState:
    """What a state dict holds of one parameter's state, on this rank."""

    elements: Mapping[str, Tensor]
    """The owned entries of state that is cut with the parameter, and of `master`."""
    others: Mapping[str, Any]
    """All other state, such as a step counter: numbers, or lists of them for tensors."""


class LoadedState:
    """Saved optimizer state that fits this optimizer on this rank.

    Args:
        groups: the saved param groups. Parameters are identified by name if they have names, else
            by position.
        state_of: the saved state of a parameter, given its place, its key in `groups`, and what its
            state consists of with the saved hyper-parameters.

    Raises:
        ValueError, TypeError: it is of another model, optimizer class, rank or plan.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        update: ShardedUpdate,
        groups: Groups,
        state_of: Callable[[Place, Any, StateLayout], Mapping[str, Any]],
    ) -> None:
        self._optimizer, self._engine, self._update = optimizer, engine, update
        names = names_of(engine.model, optimizer.param_groups)
        keys = _match(optimizer.param_groups, names, groups)
        self._settings = [_settings_of(group) for group in groups]
        for index, settings in enumerate(self._settings):
            _check_settings(index, settings, update.defaults_of(index))
        self._layouts = update.layouts_with(self._settings)
        self._states = {
            place: self._read(place, layout, state_of(place, keys[id(place.parameter)], layout))
            for place in places_of(engine.trained)
            for layout in (self._layouts.of(place.flat, place.position),)
        }
        self._others: dict[Place, dict[str, Any] | None] = {}
        self.changed: tuple[FlatParameter, ...] = ()
        """After `agree`, those whose values masters replace on some rank."""

    def _read(self, place: Place, layout: StateLayout, values: Mapping[str, Any]) -> ParameterState:
        """Check the state of one parameter."""
        name = place.name
        values = {key: value for key, value in taken_apart(values).items() if value is not None}
        if _is_absent(values.values()):
            check_held((0, 0), place.owned, f"the state of {name!r}")
            return ParameterState({}, {})
        keys = values.keys() - {MASTER}
        if keys and keys != layout.keys():
            raise ValueError(
                f"the state of {name!r} has {sorted(keys)}, but this optimizer has "
                f"{sorted(layout)}; it was saved by another optimizer class or with other options"
            )
        elements, others = {}, {}
        for key, value in values.items():
            what = f"{key!r} of {name!r}"
            shape = place.parameter.shape if key == MASTER else layout[key].shape
            if shape is not None:
                elements[key] = elements_of(value, shape, place.entries(shape), what)
            else:
                others[key] = value.tolist() if isinstance(value, Tensor) else value
        if others.get("step") == 0:  # as if there was none; see `ShardedUpdate.create_state`
            others = {}
            elements = {MASTER: elements[MASTER]} if MASTER in elements else {}
        return ParameterState(elements, others)

    def agree(self, control: Control) -> None:
        """Exchange what a rank does not know of parameters of which it owns nothing. Collective.

        Raises:
            ValueError: on all ranks, if they loaded the state of different steps.
        """
        mine = []
        for place, state in self._states.items():
            start, stop = place.owned
            known = dict(state.others) if state.elements.keys() - {MASTER} or state.others else None
            mine.append((start < stop, known, self._replaces_value(place)))
        by_rank = control.exchange_objects(mine, what="load_state_dict()")
        changed: dict[FlatParameter, None] = {}
        for place, found in zip(self._states, zip(*by_rank, strict=True), strict=True):
            wanted = next((others for _, others, _ in found if others is not None), None)
            self._others[place] = wanted
            if any(replaces for *_, replaces in found):
                changed[place.flat] = None
            wrong = [
                others
                for owns, others, _ in found
                if (owns or others is not None) and others != wanted
            ]
            if wrong:
                loaded = control.group.by_name([others for _, others, _ in found])
                raise agreed(
                    ValueError(
                        f"the ranks loaded different states of {place.name!r}: {loaded} by rank; "
                        "load the same checkpoint on all ranks"
                    )
                )
        self.changed = tuple(flat for flat in changed if not flat.is_local)

    def _replaces_value(self, place: Place) -> bool:
        """Whether the parameter's values follow a master that was loaded.

        By [Note: differences] they do not: the next update sends the difference.
        """
        return MASTER in self._states[place].elements and not place.flat.sends_differences

    def apply(self) -> None:
        """Replace state and hyper-parameters of the optimizer. Local, once, after `agree`."""
        for flat in self._engine.trained:
            places = list(places_of([flat]))
            # Adjacent parameters with the same group and step are one run, on all ranks.
            runs = adjacent_runs(flat, [self._others[place] for place in places])
            states = {run: state for run in runs if (state := self._state_of(run))}
            self._update.replace_runs(flat, runs, states.get)
            self._engine.strategy.wait_for_readers(flat)
            for place in places:
                self._copy(place, MASTER, flat.master, flat.owned[0])
                part = flat.owned_part(place.position)
                if part is not None and self._replaces_value(place):
                    flat.shard[part].copy_(flat.master[part])
                del self._states[place]  # its memory may be needed for the next flat parameter
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)
        self._update.use_settings(self._optimizer.param_groups)

    def _state_of(self, run: ParameterRun) -> dict[str, Any]:
        """The state of the owned part of a run, in the memory that it has now if that fits."""
        others = self._others[Place(run.flat, run.first)]
        if run.tensor is None or others is None:
            return {}
        layout, state = self._layouts.of(run.flat, run.first), self._old_state_of(run)
        if run.is_separate or state.keys() != layout.keys():
            state = self._layouts.new_state(run.flat, run.first, run.tensor.shape)
        parts = taken_apart(state)
        for key, (shape, value) in layout.items():
            if shape is not None:
                whole = shape if run.is_separate else None
                for position in range(run.first, run.last):
                    self._copy(Place(run.flat, position), key, parts[key], run.first_owned, whole)
            elif key in state and isinstance(value, Tensor):
                state[key] = torch.tensor(others[key], dtype=value.dtype, device=value.device)
            elif key in state:
                state[key] = copy.deepcopy(others[key])
        return state

    def _old_state_of(self, run: ParameterRun) -> dict[str, Any]:
        for old in self._update.runs:
            if old.flat is run.flat and (old.first, old.last) == (run.first, run.last):
                return self._update.inner_state(old)
        return {}

    def _copy(
        self, place: Place, key: str, to: Tensor, first: int, shape: Sequence[int] | None = None
    ) -> None:
        """Copy the owned entries of a parameter to a flat tensor that begins at `first`."""
        elements = self._states[place].elements.get(key)
        if elements is not None:
            place.shard(to, first, shape).local.copy_(elements)


def _is_absent(values: Iterable[Any]) -> bool:
    """Whether no value has elements: it is of a rank that owns nothing of the parameter."""
    from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor

    parts = [value for value in values if isinstance(value, ShardTensor)]
    return bool(parts) and all(part.numel() and not part.local.numel() for part in parts)


def _match(groups: Groups, names: Sequence[Sequence[str]], saved: Groups) -> dict[int, Any]:
    """The key of every parameter in the saved state, by `id(parameter)`."""
    if len(groups) != len(saved):
        raise ValueError(
            f"the state dict has {len(saved)} param groups, but this optimizer has {len(groups)}"
        )
    keys: dict[int, Any] = {}
    for index, (group, own, other) in enumerate(zip(groups, names, saved, strict=True)):
        params = other["params"]
        if len(params) != len(own):
            raise ValueError(
                f"param group {index} of the state dict has {len(params)} parameters, but here it "
                f"has {len(own)}"
            )
        if "param_names" in other:
            if len(other["param_names"]) != len(params):
                raise ValueError(
                    f"param group {index} of the state dict has {len(params)} parameters, but "
                    f"{len(other['param_names'])} 'param_names'; leave the names out, or give one "
                    "per parameter"
                )
            by_name = dict(zip(map(canonical, other["param_names"]), params, strict=True))
            given = list(map(canonical, group.get("param_names", own)))
            params = _in_order(index, given, by_name)
        elif all(isinstance(key, str) for key in params):
            params = _in_order(index, own, {name: name for name in params})
        keys |= {id(p): key for p, key in zip(group["params"], params, strict=True)}
    return keys


def _in_order(index: int, own: Sequence[str], by_name: Mapping[str, Any]) -> list[Any]:
    """The values of `by_name` in the order of this optimizer's parameters."""
    if by_name.keys() != set(own):
        missing, unknown = sorted(set(own) - by_name.keys()), sorted(by_name.keys() - set(own))
        raise ValueError(
            f"param group {index} of the state dict is of other parameters: it lacks "
            f"{format_names(missing)} and has {format_names(unknown)}; use the same model and "
            "param groups"
        )
    return [by_name[name] for name in own]


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the hyper-parameters of a saved param group, without those of this process."""
    ignored = _NO_SETTINGS | IMPLEMENTATIONS
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in ignored}


def _check_settings(index: int, settings: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    missing = sorted(required.keys() - settings.keys() - _OPTIONAL)
    if missing:
        raise ValueError(
            f"param group {index} of the state dict has no {format_names(missing)}; it was saved "
            "by another optimizer class"
        )
    decoupled = settings.get("decoupled_weight_decay", required.get("decoupled_weight_decay"))
    if decoupled != required.get("decoupled_weight_decay"):
        raise ValueError(
            f"param group {index} of the state dict was saved with decoupled_weight_decay="
            f"{decoupled}, but this optimizer has {required.get('decoupled_weight_decay')}: Adam "
            "and AdamW differ in it"
        )

"""`load_checkpoint`: reads what this rank needs of a checkpoint with any other layout.

[Note: a load]
All that can fail comes first: names, shapes and groups are compared, each rank verifies a share of
the files, optimizer state is read into new memory. The ranks agree after each part. Only then do
values change, which are read in place, and the optimizer state is applied as that of a state dict:
flat parameter by flat parameter, each of which frees what was read of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from poplar.checkpoint.collection import no_garbage_collection
from poplar.checkpoint.files.opened import OpenedCheckpoint
from poplar.checkpoint.files.transfers import transfer_on_all_ranks
from poplar.checkpoint.frozen_base import base_of, check_base, description_of
from poplar.checkpoint.random_state import set_random_state
from poplar.checkpoint.save import RANK, SCALER, STATE
from poplar.checkpoint.saved_names import check_model, read_groups, saved_optimizer_keys
from poplar.checkpoint.state_dicts.loaded_state import LoadedState, send_values
from poplar.checkpoint.state_dicts.optimizer_state import MASTER
from poplar.checkpoint.state_dicts.place import Place, places_of
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.checkpoint.training_state import (
    SENT,
    STEPS,
    Checkpointed,
    TrainingParts,
    check_idle,
    is_extra_state,
    model_values,
    saved_buffers,
    stored_values,
)
from poplar.system.storage import separate_elements
from poplar.values.canonical_name import canonical
from poplar.zero.absent_parameter import AbsentValues
from poplar.zero.agreement import caught, run_on_all_ranks
from poplar.zero.collective_calls import ForAllRanks, LeftOutCalls
from poplar.zero.optimizers.state_values import StateLayout

R = TypeVar("R")


def load_checkpoint(
    folder: str | Path,
    optimizer: Checkpointed,
    *,
    state: Mapping[str, Any] | None = None,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Load the training state in place. Collective, between steps.

    The number of ranks, stage, shares and units may differ from those of the save. Of adapters that
    were saved alone, the base stays as it is. With the same plan training goes on with the same
    bits; the random states of the ranks are restored if there are as many ranks. Checkpoints that
    `torch.distributed.checkpoint` wrote of `{"model": ..., "optim": ...}`, as its `get_state_dict`
    returns them, can be loaded too; they have no checksums.

    Args:
        folder: a checkpoint, in a folder that all ranks see.
        state: by name, the objects with `load_state_dict` that get their saved state.
        weights_only: saved values may consist of tensors and plain types only, as those of
            `torch.load`, so that a checkpoint of a stranger cannot run code. False: of any classes.

    Returns:
        By name, all other values that were saved with `state=`.

    Raises:
        DamagedCheckpoint: a file is missing, truncated or changed; names it.
        FileNotFoundError: there is no checkpoint.
        ValueError: it is of another model or optimizer class, has other param groups, lacks
            something, has a newer format, or contains an object of a class, see `weights_only`.
        RankFailed: another rank failed. Unless the message says so, nothing has changed.
    """
    wanted = state or {}

    def load() -> tuple[None, Load]:
        return None, load_now(folder, optimizer, wanted, weights_only=weights_only)

    return load_as("load_checkpoint()", optimizer, load, wanted)[1]


def load_now(
    folder: str | Path, optimizer: Checkpointed, wanted: Mapping[str, Any], *, weights_only: bool
) -> Load:
    """Load on the active ranks, as part of a call. Arguments as for `load_checkpoint`."""

    def open_checkpoint() -> OpenedCheckpoint:
        return OpenedCheckpoint(Path(os.path.abspath(folder)), weights_only=weights_only)

    return load_opened(open_checkpoint, optimizer, wanted, f"load_checkpoint({str(folder)!r})")


@torch.no_grad()
@no_garbage_collection()
def load_opened(
    open_checkpoint: Callable[[], OpenedCheckpoint],
    optimizer: Checkpointed,
    wanted: Mapping[str, Any],
    doing: str,
) -> Load:
    """As `load_now`, what a function opens on each rank."""
    parts = optimizer._training_parts()
    control, device = parts.engine.control, parts.engine.flats[0].device

    def prepare() -> Load:
        check_idle(parts, "load_checkpoint()")
        return Load(parts, open_checkpoint(), wanted)

    load = run_on_all_ranks(control, prepare, doing=doing)
    transfer_on_all_ranks(control, device, load.verify, doing=doing)
    load.opened.collect(control, load.targets)
    transfer_on_all_ranks(control, device, load.read_optimizer_state, doing=doing)
    load.optimizer_state.agree(control)
    load.set_objects(doing)  # what changes first: they can be given their state back
    with optimizer.collective_calls.changing_values("load_checkpoint()"):
        load.run(doing)
    return load


def load_as(
    name: str,
    optimizer: Checkpointed,
    load: Callable[[], tuple[R, Load | None]],
    wanted: Mapping[str, Any],
) -> tuple[R, dict[str, Any]]:
    """Load in a call with this name. Collective.

    A rank that the plan leaves out loads nothing but the objects `wanted`.

    Args:
        optimizer: as for `load_checkpoint`.
        load: returns any result, and what has been loaded.
        wanted: by name, objects with `load_state_dict`.

    Returns:
        The result, and by name the values that were saved and are no state of an object.
    """
    calls = optimizer.collective_calls

    def run() -> ForAllRanks:
        result, loaded = load()
        return ForAllRanks((result, loaded and (loaded.values, loaded.object_states)))

    result, found = calls.call(name, run).value
    values, states = found or ({}, {})
    if isinstance(calls, LeftOutCalls):
        for key, state in states.items():
            wanted[key].load_state_dict(state)
    return result, values


class Load:
    """A checkpoint that fits the model and optimizer of this rank."""

    def __init__(
        self, parts: TrainingParts, opened: OpenedCheckpoint, wanted: Mapping[str, Any]
    ) -> None:
        """Check that it fits, and allocate; nothing changes."""
        self.parts, self.opened = parts, opened
        self._check_class()
        values = model_values(parts)
        base = self._base_elsewhere(values)
        stored = {name: value for name, value in values.items() if name not in base}
        self._model = {n: v for n, v in stored.items() if not is_extra_state(n)}
        self._check_values()
        self._stored_names = check_model(opened, self._model)
        keys = saved_optimizer_keys(opened, parts)
        # torch's `get_state_dict` stores the masters with the optimizer state.
        self._masters = {n: found.pop(MASTER) for n, found in keys.items() if MASTER in found}
        self._to_read: dict[str, Tensor] = {}
        """Optimizer state by name in the checkpoint, in memory of its own."""
        self.optimizer_state = self._loaded_state(keys)
        self._values = dict(self._value_targets())
        self._sent = dict(self._sent_targets())
        for name, target in self.targets.items():
            self._check_shape(name, target.shape)
        opened.check_complete(self.targets)
        self._read_further_values(wanted, stored.keys() - self._model.keys())

    def _read_further_values(self, wanted: Mapping[str, Any], extra_states: Iterable[str]) -> None:
        """Read what is neither a parameter nor optimizer state; nothing changes."""
        parts, opened = self.parts, self.opened
        self._objects = {name: obj for name, obj in wanted.items() if _is_object(obj)}
        saved = {n.removeprefix(STATE): n for n in opened.described if n.startswith(STATE)}
        if absent := sorted(self._objects.keys() - saved.keys()):
            raise ValueError(
                f"{opened.folder} has no state of {absent}; it has that of {sorted(saved)}. Pass "
                "what it has as state="
            )
        self.values = {name: opened.value(stored) for name, stored in saved.items()}
        self.object_states = {name: self.values.pop(name) for name in self._objects}
        self._extra_states = {name: self._extra_state(name) for name in extra_states}
        own = f"{RANK}{parts.engine.control.group.rank}"
        manifest = opened.manifest
        as_many = manifest is not None and manifest.world_size == parts.engine.control.group.size
        self._own = opened.value(own) if as_many else None
        if self._own is not None:
            self._check_own(own, self._own["buffers"])
        self._steps = opened.value(STEPS) if STEPS in opened.described else None
        has_scaler = parts.scaler is not None and SCALER in opened.described
        self._scaler = opened.value(SCALER) if has_scaler else None

    def _check_own(self, name: str, found: Mapping[str, Any]) -> None:
        """Check the buffers and extra states that only this rank has, which are set last."""
        buffers = saved_buffers(self.parts.engine.model)
        # Earlier versions saved those that are in no state dict, too.
        self._own_buffers = {n: (buffers[n], found[n]) for n in found.keys() & buffers.keys()}
        self._extra_states |= {n: v for n, v in found.items() if n in self._extra_states}
        if any(own.shape != value.shape for own, value in self._own_buffers.values()):
            raise ValueError(
                f"{self.opened.folder} is of another model: {name!r} has other buffers"
            )

    @property
    def targets(self) -> Mapping[str, Tensor]:
        """By name in the checkpoint, the memory for all that is read."""
        return {**self._to_read, **self._values, **self._sent}

    def read_optimizer_state(self) -> None:
        """Read this rank's part of the optimizer state, which is not used yet. Local."""
        self.opened.read_into(self._to_read)
        self._to_read = {}  # which `optimizer_state` frees while it is applied

    def verify(self) -> None:
        """Verify this rank's share of the files. Local."""
        group = self.parts.engine.control.group
        self.opened.verify(group.rank, group.size)

    def run(self, doing: str) -> None:
        """Change values. Collective."""
        control, device = self.parts.engine.control, self.parts.engine.flats[0].device
        changing = f"{doing} after values had changed; load a checkpoint again before training"
        transfer_on_all_ranks(control, device, self.read_values, doing=changing)
        send_values(self.parts.engine, self.parts.engine.flats)
        run_on_all_ranks(control, self.set_rest, doing=changing)

    def set_objects(self, doing: str) -> None:
        """Give the user's objects their state; if one raises, all keep theirs. Collective."""
        before: dict[str, Any] = {}

        def load_all() -> None:
            for name, obj in self._objects.items():
                before[name] = deepcopy(obj.state_dict())  # which may share memory with it
                obj.load_state_dict(self.object_states[name])

        try:
            run_on_all_ranks(self.parts.engine.control, load_all, doing=doing)
        except BaseException:
            for name, state in reversed(before.items()):  # an object may have two names
                if error := caught(partial(self._objects[name].load_state_dict, state)):
                    text = "%s: state %r could not be restored: %r"
                    logging.getLogger("poplar").warning(text, doing, name, error)
            raise

    def read_values(self) -> None:
        """Set the values that this rank stores, and its optimizer state. Local."""
        strategy = self.parts.engine.strategy
        for flat in self.parts.engine.flats:
            strategy.wait_for_readers(flat)
        self.opened.read_into(self._values)
        for flat in self.parts.engine.flats:
            if flat.trained and flat.shard is not flat.master:
                flat.shard.copy_(flat.master)
        self.opened.read_into(self._sent)
        for flat in self.parts.engine.trained:
            flat.mark_sent()
        if self._steps is not None:
            strategy.continue_after(self._steps)
        self.optimizer_state.apply()  # which allocates, so it may fail

    def set_rest(self) -> None:
        """Set extra states of modules, the scaler, own buffers and random states. Local."""
        parts = self.parts
        # Of a wrapper and its module, which have one name, the module comes later.
        modules = {
            canonical(f"{name}._extra_state").lstrip("."): module
            for name, module in parts.engine.model.named_modules(remove_duplicate=False)
        }
        for name, value in self._extra_states.items():
            modules[name].set_extra_state(value)
        if parts.scaler is not None and self._scaler is not None:
            parts.scaler.load_state_dict(self._scaler)
        if self._own is not None:
            for buffer, value in self._own_buffers.values():
                separate_elements(buffer)
                buffer.copy_(value)
            set_random_state(self._own["random"], parts.engine.flats[0].device)

    def _base_elsewhere(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The entries of the model that are not in a checkpoint of adapters alone."""
        if self.opened.manifest is None or not self.opened.manifest.base:
            return {}
        base = base_of(self.parts.engine, values)
        own = description_of(self.parts.engine.model, base)
        check_base(self.opened.folder, self.opened.manifest.base, own)
        return base

    def _check_values(self) -> None:
        model = self.parts.engine.model
        known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for name, value in self._model.items():
            if id(value) not in known:
                raise TypeError(
                    f"the model's state_dict() computes {name!r}, so it cannot be loaded in place; "
                    "load with torch.distributed.checkpoint and model.load_state_dict()"
                )

    def _extra_state(self, name: str) -> Any:
        try:
            return self.opened.whole_value(("model", name))
        except KeyError:
            raise ValueError(
                f"{self.opened.folder} is of another model: it lacks {name!r}"
            ) from None

    def _check_class(self) -> None:
        manifest = self.opened.manifest
        own = self.parts.update.name
        if manifest is not None and manifest.optimizer != own:
            raise ValueError(
                f"{self.opened.folder} has the state of {manifest.optimizer}, but this optimizer "
                f"is {own}; build it with optimizer_class={manifest.optimizer}"
            )

    def _loaded_state(self, keys: Mapping[str, Mapping[str, str]]) -> LoadedState:
        """The optimizer state, of which the elements that this rank owns are still to be read.

        Args:
            keys: by parameter and name of its state, the name in the checkpoint.
        """
        parts, opened = self.parts, self.opened

        def state_of(place: Place, _: str, layout: StateLayout) -> dict[str, Any]:
            values: dict[str, Any] = {}
            start, stop = place.owned
            for key, stored in keys.get(place.name, {}).items():
                if key not in layout:
                    values[key] = stored  # `LoadedState` refuses the key
                    continue
                shape, example = layout[key]
                if shape is not None:
                    first, end = place.entries(shape)
                    device = place.flat.master.device  # where the state is in the end
                    own = torch.empty(end - first, dtype=example.dtype, device=device)
                    values[key] = ShardTensor(own, shape, first)
                    self._to_read[stored] = values[key]
                elif start < stop or not place.parameter.numel():  # else the owners know it
                    values[key] = opened.value(stored)
            return values

        groups = read_groups(opened)
        try:
            return LoadedState(parts.optimizer, parts.engine, parts.update, groups, state_of)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{opened.folder} does not fit this optimizer: {error}") from error

    def _check_shape(self, stored: str, shape: torch.Size) -> None:
        described = self.opened.tensor(stored)
        if described is None or described.size != shape:
            found = None if described is None else tuple(described.size)
            raise ValueError(
                f"{self.opened.folder} does not fit this optimizer: {stored!r} has shape {found} "
                f"there, but {tuple(shape)} here"
            )

    def _value_targets(self) -> Iterator[tuple[str, Tensor]]:
        places = {id(place.parameter): place for place in places_of(self.parts.engine.flats)}
        done: set[int] = set()
        for name, value in self._model.items():
            if id(value) in done:
                continue
            done.add(id(value))
            if not isinstance(value, AbsentValues):
                separate_elements(value)
            target = value.detach()
            if place := places.get(id(value)):
                target = place.shard(stored_values(place.flat))
            yield self._masters.get(name, self._stored_names[name]), target

    def _sent_targets(self) -> Iterator[tuple[str, Tensor]]:
        """What all ranks compute with, if this optimizer sends differences and they were saved."""
        for place in places_of(self.parts.engine.trained):
            if place.flat.sends_differences and SENT + place.name in self.opened.described:
                yield SENT + place.name, place.shard(place.flat.shard)


def _is_object(value: Any) -> bool:
    return hasattr(value, "load_state_dict")

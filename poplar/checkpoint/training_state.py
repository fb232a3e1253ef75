"""The training state as named tensors, as `torch.distributed.checkpoint` stores them.

Names are those of torch's `get_state_dict`: `model.<parameter>`, `optim.state.<parameter>.exp_avg`,
`optim.param_groups`. Trained parameters are stored in fp32 (the masters), of which the values in
which the model computes are a rounding, so that readers of any dtype get the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from poplar.checkpoint.files.opened import WHOLE, WHOLE_PATH
from poplar.checkpoint.frozen_base import base_of
from poplar.checkpoint.state_dicts.place import Place, names_of, places_of
from poplar.values.canonical_name import canonical
from poplar.values.plan import Plan
from poplar.zero.collective_calls import CollectiveCalls
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.grad_scaler import GradScaler
from poplar.zero.preserved_state import persistent_buffers
from poplar.zero.update import ShardedUpdate

STEPS = "communication.steps"
"""The number of steps, by which compression is seeded."""
SENT = "communication.sent."
"""Of a parameter, the values of all ranks: see [Note: differences] in `zero.stages.strategy`."""


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """What the state of one optimizer consists of, on this rank."""

    engine: Engine
    update: ShardedUpdate
    optimizer: torch.optim.Optimizer
    """The user's, with the param groups."""
    stage: int
    plan: Plan | None
    scaler: GradScaler | None
    reject_nonfinite: Callable[[str], None]
    """Raises on all ranks if the last step was not finite and this was not said yet, or if trained
    parameters are not. The argument: the caller, for the message. Collective."""
    changes_of_ranks: int
    """How often the ranks that train have changed; equal on all of them. What they agreed on before
    a change is of no use: a rank that comes back does not know all of it."""
    unfinished: dict[object, Callable[[], None]]
    """By who has begun something that only the ranks that train now can finish: a function that
    finishes it. They call all of them before other ranks train. Collective, in this order."""


class Checkpointed(Protocol):
    """An optimizer whose state can be saved, such as `HeteroZeroOptimizer`."""

    @property
    def collective_calls(self) -> CollectiveCalls:
        """The calls that save and load, too, belong to."""
        ...

    def _training_parts(self) -> TrainingParts:
        """What its state consists of."""
        ...


@dataclass(frozen=True, kw_only=True)
class Entries:
    """What one rank adds to a checkpoint: flat names, each with its path in the nested form."""

    values: Mapping[str, Any]
    paths: Mapping[str, tuple[str | int, ...]]
    aliases: Mapping[str, str]
    """Further names of tied parameters, with the name under which they are stored."""
    extra_states: Mapping[str, Any]
    """By name in the model, this rank's extra states of modules; those of one rank are stored."""


def is_extra_state(name: str) -> bool:
    """Whether a name in a model's state dict is a module's extra state: any value, of any shape."""
    return name.rpartition(".")[2] == "_extra_state"


def model_values(parts: TrainingParts) -> dict[str, Any]:
    """What `model.state_dict()` has, without values of sharded parameters; tied names are equal."""
    with parts.engine.values.naming_parameters():
        state = parts.engine.model.state_dict(keep_vars=True)
    found = {canonical(name): value for name, value in state.items()}
    present = {id(value) for value in found.values()}
    for flat in parts.engine.flats:
        missing = zip(flat.names, flat.parameters, strict=True)
        found.update({canonical(n): p for n, p in missing if id(p) not in present})
        present.update(map(id, flat.parameters))
    return found


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By name, the buffers that `model.state_dict()` has."""
    return {canonical(name): buffer for name, buffer in persistent_buffers(model).items()}


def saved_entries(parts: TrainingParts, *, frozen: bool, rank: int | None = None) -> Entries:
    """This rank's part of model and optimizer. Views: nothing is copied or sent.

    Args:
        frozen: the base of adapters, too.
        rank: another rank, whose part this rank has, too.
    """
    rank = parts.engine.comm.group.rank if rank is None else rank
    shards = {
        id(place.parameter): place.saved_shard(stored_values(place.flat), rank)
        for place in places_of(parts.engine.flats)
    }
    model: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    whole = model_values(parts)
    base = {} if frozen else base_of(parts.engine, whole)
    for name, value in whole.items():
        if name in base:
            continue
        stored = first.setdefault(id(value), name) if isinstance(value, Tensor) else name
        if stored != name:
            aliases[f"model.{name}"] = f"model.{stored}"
        elif id(value) in shards:
            model[name] = shards[id(value)]
        elif rank == parts.engine.buffer_rank:
            model[name] = value.detach() if isinstance(value, Tensor) else value
    optim: dict[str, Any] = {"state": saved_optimizer_state(parts, rank)}
    if rank == 0:
        optim["param_groups"] = saved_groups(parts)
    whole_state = {"model": model, "optim": optim, **_communication_state(parts, rank)}
    values, paths = flatten_state_dict(whole_state)
    paths.update({alias: ("model", alias.removeprefix("model.")) for alias in aliases})
    # What has any content is stored as one value, too; its parts are for readers of torch.
    opaque: dict[tuple[str | int, ...], Any] = {
        ("model", name): value for name, value in model.items() if is_extra_state(name)
    }
    for number, group in enumerate(optim.get("param_groups", ())):
        opaque |= {("optim", "param_groups", number, key): group[key] for key in group}
    for path, value in opaque.items():
        if (name := ".".join(map(str, path))) not in values:
            values[WHOLE + name], paths[WHOLE + name] = value, (*WHOLE_PATH, *path)
    extra_states = {name: value for name, value in whole.items() if is_extra_state(name)}
    return Entries(values=values, paths=paths, aliases=aliases, extra_states=extra_states)


def _communication_state(parts: TrainingParts, rank: int) -> dict[str, Any]:
    """What compressed communication adds, so that training goes on with the same bits."""
    strategy = parts.engine.strategy
    sent = {
        place.name: place.saved_shard(flat.shard, rank)
        for place in places_of(parts.engine.trained)
        if (flat := place.flat).sends_differences
    }
    # Also of exact training, which may be compressed later.
    return {"communication": {"sent": sent, **({"steps": strategy.steps} if rank == 0 else {})}}


def saved_groups(parts: TrainingParts) -> list[dict[str, Any]]:
    """The param groups, with the names of their parameters."""
    groups = parts.optimizer.param_groups
    names = names_of(parts.engine.model, groups)
    return [{**group, "params": inside} for group, inside in zip(groups, names, strict=True)]


def saved_optimizer_state(parts: TrainingParts, rank: int) -> dict[str, dict[str, Any]]:
    """By parameter, a rank's part of its optimizer state; views."""
    found: dict[str, dict[str, Any]] = {}
    for run in parts.update.runs:
        if not (state := parts.update.state_of(run)):
            continue
        for place in (Place(run.flat, position) for position in range(run.first, run.last)):
            found[place.name] = {
                key: place.saved_shard(value, rank, run.first_owned, shape)
                if (shape := parts.update.whole_shape(run, place.position, key, value)) is not None
                else value
                for key, value in state.items()
            }
    return found


def stored_values(flat: FlatParameter) -> Tensor:
    """The values of the owned part that are stored: masters, or those of frozen parameters."""
    return flat.master if flat.trained else flat.shard


def check_idle(parts: TrainingParts, doing: str) -> None:
    """Check that no step is in progress. Local.

    Raises:
        RuntimeError: one is, or the parameters are unsharded by the user.
    """
    engine = parts.engine
    engine.hooks.drop_implicit_pass()
    engine.reject_open_step(doing)
    if engine.values.has_unsharded:
        raise RuntimeError(f"{doing} inside full_parameters(); leave that context first")
    parts.update.adopt_replaced_data(engine.flats)
    for flat in engine.trained:
        parts.update.take_written_values(flat)

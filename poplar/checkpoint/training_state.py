"""The training state as named tensors, as `torch.distributed.checkpoint` stores them.

Names are those of torch's `get_state_dict`: `model.<parameter>`, `optim.state.<parameter>.exp_avg`,
`optim.param_groups`. Trained parameters are stored in fp32 (the masters), of which the values in
which the model computes are a rounding, so that readers of any dtype get the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from poplar.checkpoint.names import canonical, names_of
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.values.plan import Plan
from poplar.zero.collective_calls import CollectiveCalls
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.grad_scaler import GradScaler
from poplar.zero.update import ParameterRun, ShardedUpdate, adjacent_runs, is_elementwise


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """What the state of one optimizer consists of, on this rank."""

    engine: Engine
    update: ShardedUpdate
    param_groups: list[dict[str, Any]]
    """The user's: hyper-parameters and parameters."""
    stage: int
    plan: Plan | None
    scaler: GradScaler | None
    reject_nonfinite: Callable[[str], None]
    """Raises on all ranks if the last step was not finite and this was not said yet, or if trained
    parameters are not. The argument: the caller, for the message. Collective."""


class Checkpointed(Protocol):
    """An optimizer whose state can be saved, such as `HeteroZeroOptimizer`."""

    @property
    def collective_calls(self) -> CollectiveCalls:
        """The calls that save and load, too, belong to."""
        ...

    def training_parts(self) -> TrainingParts:
        """What its state consists of."""
        ...


@dataclass(frozen=True, kw_only=True)
class Entries:
    """What one rank adds to a checkpoint: flat names, each with its path in the nested form."""

    values: Mapping[str, Any]
    paths: Mapping[str, tuple[str | int, ...]]
    aliases: Mapping[str, str]
    """Further names of tied parameters, with the name under which they are stored."""


def optimizer_name(parts: TrainingParts) -> str:
    """The name of the user's optimizer class."""
    kinds = type(parts.update.inner).__mro__
    return next(kind.__name__ for kind in kinds if not kind.__module__.startswith("poplar."))


def is_extra_state(name: str) -> bool:
    """Whether a name in a model's state dict is a module's extra state: any value, of any shape."""
    return name.rpartition(".")[2] == "_extra_state"


def model_values(parts: TrainingParts) -> dict[str, Any]:
    """What `model.state_dict()` has, without values of sharded parameters; tied names are equal."""
    with parts.engine.naming_parameters():
        state = parts.engine.model.state_dict(keep_vars=True)
    found = {canonical(name): value for name, value in state.items()}
    present = {id(value) for value in found.values()}
    for flat in parts.engine.flats:
        missing = zip(flat.names, flat.parameters, strict=True)
        found.update({canonical(n): p for n, p in missing if id(p) not in present})
        present.update(map(id, flat.parameters))
    return found


def saved_entries(parts: TrainingParts) -> Entries:
    """This rank's part of model and optimizer. Views: nothing is copied or sent."""
    rank = parts.engine.comm.group.rank
    shards = {
        id(parameter): shard
        for flat in parts.engine.flats
        for parameter, shard in zip(flat.parameters, _value_shards(flat, rank), strict=True)
    }
    model: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model_values(parts).items():
        stored = first.setdefault(id(value), name) if isinstance(value, Tensor) else name
        if stored != name:
            aliases[f"model.{name}"] = f"model.{stored}"
        elif id(value) in shards:
            model[name] = shards[id(value)]
        elif rank == 0:
            model[name] = value.detach() if isinstance(value, Tensor) else value
    optim: dict[str, Any] = {"state": saved_optimizer_state(parts)}
    if rank == 0:
        optim["param_groups"] = saved_groups(parts)
    values, paths = flatten_state_dict({"model": model, "optim": optim})
    paths.update({alias: ("model", alias.removeprefix("model.")) for alias in aliases})
    return Entries(values=values, paths=paths, aliases=aliases)


def saved_groups(parts: TrainingParts) -> list[dict[str, Any]]:
    """The param groups, with the names of their parameters."""
    names = names_of(parts.engine.model, parts.param_groups)
    return [
        {**group, "params": inside} for group, inside in zip(parts.param_groups, names, strict=True)
    ]


def saved_optimizer_state(parts: TrainingParts) -> dict[str, dict[str, Any]]:
    """By parameter, this rank's part of its optimizer state; views."""
    rank = parts.engine.comm.group.rank
    found: dict[str, dict[str, Any]] = {}
    for run in parts.update.runs:
        state = parts.update.state_of(run)
        if not state or run.owned is None:
            continue
        base = run.flat.owned[0] + run.owned.start
        low, high = run.flat.layout.bounds(rank)
        for position in range(run.first, run.last):
            pieces: dict[str, Any] = {}
            for key, value in state.items():
                if is_elementwise(value, run.tensor):
                    pieces[key] = shard_of(run.flat, position, value, base, low, high)
                else:
                    pieces[key] = value
            found[canonical(run.flat.names[position])] = pieces
    return found


def shard_of(
    flat: FlatParameter, position: int, values: Tensor, base: int, low: int, high: int
) -> ShardTensor:
    """The part of one parameter in `[low, high)`, a view.

    Args:
        values: 1-D, one per element of the flat parameter from `base` on.
        low: the part wanted, in elements of the flat parameter.
        high: its end.
    """
    parameter, offset = flat.parameters[position], flat.offsets[position]
    start = min(max(low, offset, base), offset + parameter.numel())
    stop = max(start, min(high, offset + parameter.numel(), base + values.numel()))
    local = values[start - base : stop - base] if stop > start else values[:0]
    return ShardTensor(local, parameter.shape, start - offset)


def stored_values(flat: FlatParameter) -> Tensor:
    """The values of the owned part that are stored: masters, or those of frozen parameters."""
    return flat.master if flat.trained else flat.shard


def _value_shards(flat: FlatParameter, rank: int) -> Iterator[ShardTensor]:
    low, high = flat.layout.bounds(rank)
    for position in range(len(flat.parameters)):
        yield shard_of(flat, position, stored_values(flat), flat.owned[0], low, high)


def loaded_runs(
    parts: TrainingParts, shared: Mapping[str, Mapping[str, Any]]
) -> list[ParameterRun]:
    """Runs of parameters with the same group and the same shared state. Equal on all ranks.

    Args:
        shared: by parameter, its state that is not per element; nothing for those without state.
    """
    return [
        run
        for flat in parts.engine.trained
        for run in adjacent_runs(flat, [_comparable(shared.get(canonical(n))) for n in flat.names])
    ]


def _comparable(state: Mapping[str, Any] | None) -> Any:
    if state is None:
        return None
    return [
        (key, value.tolist() if isinstance(value, Tensor) else value)
        for key, value in sorted(state.items())
    ]


def new_run_state(
    run: ParameterRun, layout: Mapping[str, Any], shared: Mapping[str, Any]
) -> dict[str, Any]:
    """State for the owned part of a run, to be filled; empty if this rank owns nothing.

    Args:
        layout: as `ShardedUpdate.state_layout` gives it.
        shared: the state that is not per element.
    """
    if run.tensor is None:
        return {}
    state: dict[str, Any] = {}
    for key, (elementwise, example) in layout.items():
        if elementwise:
            state[key] = torch.empty_like(run.tensor, dtype=example.dtype)
            for gap in _padding(run):
                state[key][gap] = 0  # it is updated too
        elif isinstance(example, Tensor):
            state[key] = torch.empty_like(example).copy_(torch.as_tensor(shared[key], device="cpu"))
        else:
            state[key] = shared[key]
    return state


def _padding(run: ParameterRun) -> Iterator[slice]:
    """What belongs to no parameter in the tensor of a run."""
    flat = run.flat
    assert run.owned is not None
    for position in range(run.first, run.last):
        start, stop = flat.span(position)
        gap = flat.intersect_owned(start + flat.parameters[position].numel(), stop)
        if gap is not None:
            yield slice(gap.start - run.owned.start, gap.stop - run.owned.start)


def check_idle(parts: TrainingParts, doing: str) -> None:
    """Check that no step is in progress. Local.

    Raises:
        RuntimeError: one is, or the parameters are unsharded by the user.
    """
    engine = parts.engine
    engine.drop_implicit_pass()
    if engine.has_gradients or engine.scheduler.active:
        raise RuntimeError(f"{doing} in the middle of a step; call it after step()")
    if engine.has_unsharded_units:
        raise RuntimeError(f"{doing} inside full_parameters(); leave that context first")
    parts.update.adopt_replaced_data(engine.flats)
    for flat in engine.trained:
        parts.update.take_written_values(flat)

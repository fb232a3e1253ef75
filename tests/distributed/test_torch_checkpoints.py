"""Checkpoints of torch's `get_state_dict` move between Poplar plans, FSDP2, DDP and plain PyTorch.

The state has the same bits after loading, and the next steps are those of one uninterrupted run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import pytest
import ranks as harness
import reference
import torch
import torch.distributed.checkpoint as dcp
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from subset import choose
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import Run, assert_close

import poplar
from poplar import Plan
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor

RECIPE = Recipe(batches=(12,) * 5, spec=ModelSpec(two_groups=True))


@dataclass(frozen=True)
class Way:
    """How a job trains: with FSDP2, DDP or plain PyTorch, or with Poplar under `plan`."""

    name: str
    ranks: int
    plan: Plan | None = None


def with_poplar(stage: int, shares: tuple[float, ...]) -> Way:
    ranks = len(shares)
    batches = ((12 - 2 * (ranks - 1),), *(((2,),) * (ranks - 1)))
    plan = Plan(stage=stage, global_batch=12, micro_batches=batches, shares=shares)
    return Way(f"stage {stage} on {ranks}", ranks, plan)


FSDP, DDP, PLAIN = Way("fsdp", 2), Way("ddp", 2), Way("plain", 1)
FOUR, THREE = (0.4, 0.3, 0.2, 0.1), (0.5, 0.25, 0.25)


class Job:
    """A model and its optimizer; `torch.distributed.checkpoint` sees it as `Stateful`."""

    def __init__(self, way: Way, recipe: Recipe, options: StateDictOptions) -> None:
        self.way, self.recipe, self.options = way, recipe, options
        if way.plan is not None:
            self.run = Run(recipe, way.plan)
            self.model, self.optimizer = training.prepare(self.run)
            return
        self.model: nn.Module = models.build(recipe.spec)
        if way == FSDP:
            mesh = DeviceMesh.from_group(harness.group(), "cpu")
            for part in (*self.model.blocks, self.model):
                fully_shard(part, mesh=mesh)
        groups = models.parameter_groups(recipe.spec, self.model) or self.model.parameters()
        self.optimizer: Any = recipe.optimizer_class(groups, **dict(recipe.options))
        if way == DDP:
            self.model = DistributedDataParallel(self.model, process_group=harness.group())

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=self.options,
        )

    def take_step(self, step: int) -> None:
        if self.way.plan is not None:
            training.take_step(self.run, self.model, self.optimizer, step)
            return
        size = 12 // self.way.ranks
        first = size * harness.rank() if self.way.ranks > 1 else 0
        part = self.recipe.part(step, first, first + size)
        models.mean_over_samples(self.model, part).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, Tensor]:
        """All parameters and state by name, on rank 0. Collective."""
        if self.way.plan is None:
            options = StateDictOptions(full_state_dict=True, cpu_offload=self.way.ranks > 1)
            model, optim = get_state_dict(self.model, self.optimizer, options=options)
            return _flat(model, optim.get("state", {}).items())
        state = self.optimizer.full_state_dict()
        parameters = training.whole_parameters(self.model, self.optimizer)
        if state is None:
            return {}
        names = [name for group in state["param_groups"] for name in group["param_names"]]
        return _flat(parameters, ((names[key], held) for key, held in state["state"].items()))


def _flat(parameters: dict[str, Any], state: Iterable[tuple[str, dict]]) -> dict[str, Tensor]:
    named = {f"{name}.{key}": value for name, held in state for key, value in held.items()}
    return {name: value.detach().clone() for name, value in {**parameters, **named}.items()}


def train(
    way: Way,
    recipe: Recipe,
    options: StateDictOptions,
    steps: range,
    before: str | None,
    after: str,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load, train and save; returns the values after loading and at the end, on rank 0."""
    job = Job(way, recipe, options)
    group = harness.group() if way.ranks > 1 else None
    alone = way.ranks == 1
    loaded = {}
    if before is not None:  # else torch's helpers would count a step that was not taken
        dcp.load({"app": job}, checkpoint_id=before, process_group=group, no_dist=alone)
        loaded = job.values()
    for step in steps:
        job.take_step(step)
    dcp.save({"app": job}, checkpoint_id=after, process_group=group, no_dist=alone)
    return loaded, job.values()


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not wrong


MOVES = [
    (with_poplar(3, FOUR), with_poplar(1, THREE)),
    (with_poplar(0, THREE), with_poplar(3, (0.0, 0.7, 0.3))),
    (with_poplar(2, FOUR), with_poplar(0, (0.5, 0.5))),
    (with_poplar(3, (0.7, 0.3)), FSDP),
    (FSDP, with_poplar(3, FOUR)),
    (FSDP, with_poplar(1, (0.9, 0.0, 0.1))),
    (DDP, with_poplar(2, THREE)),
    (with_poplar(1, THREE), DDP),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("first", "second", "flat"),
    choose(
        quick=[(*move, number % 2 == 1) for number, move in enumerate(MOVES)],
        full=[(*move, flat) for move in MOVES for flat in (False, True)],
    ),
    ids=lambda value: getattr(value, "name", None),
)
def test_training_moves_with_the_same_bits(
    ranks: Pool, first: Way, second: Way, flat: bool, tmp_path: Path
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    saved = ranks.run(train, first, RECIPE, options, range(2), None, one, ranks=first.ranks)[0][1]
    loaded, left = ranks.run(
        train, second, RECIPE, options, range(2, 4), one, two, ranks=second.ranks
    )[0]
    assert_same_bits(loaded, saved)
    loaded, left_alone = train(PLAIN, RECIPE, options, range(4, 5), two, three)
    assert_same_bits(loaded, left)
    expected = reference.train(RECIPE).parameters
    assert_close({name: left_alone[name] for name in expected}, expected)


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec(two_groups=True, tied=True, frozen=True, unused=True),
        ModelSpec(two_groups=True, dtype=torch.bfloat16),
    ],
    ids=["special", "bf16"],
)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (with_poplar(3, FOUR), with_poplar(1, THREE)),
        (with_poplar(1, THREE), with_poplar(3, (0.2, 0.8))),
        (with_poplar(2, (0.1, 0.9)), with_poplar(0, THREE)),
        (with_poplar(0, THREE), with_poplar(2, FOUR)),
    ],
    ids=lambda way: way.name,
)
def test_masters_and_unused_parameters_move_between_plans(
    ranks: Pool, first: Way, second: Way, spec: ModelSpec, tmp_path: Path
) -> None:
    recipe = replace(RECIPE, spec=spec)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    arguments = (recipe, StateDictOptions())
    saved = ranks.run(train, first, *arguments, range(2), None, one, ranks=first.ranks)[0][1]
    loaded = ranks.run(train, second, *arguments, range(2), one, two, ranks=second.ranks)[0][0]
    assert_same_bits(loaded, saved)
    assert any(name.endswith(".master") for name in saved) == (spec.dtype is torch.bfloat16)


class OwnStates(Job):
    """A job whose checkpoint is what the objects themselves return."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])


def save_own_states(way: Way, recipe: Recipe, folder: str) -> dict[str, Tensor]:
    job = OwnStates(way, recipe, StateDictOptions())
    job.take_step(0)
    for app in (job, job.optimizer):
        path = f"{folder}/{type(app).__name__}"
        dcp.save({"app": app}, checkpoint_id=path, process_group=harness.group())
    return job.values()


def load_own_states(way: Way, recipe: Recipe, folder: str) -> list[dict[str, Tensor]]:
    found = []
    for kind in ("OwnStates", "HeteroZeroOptimizer"):
        job = OwnStates(way, recipe, StateDictOptions())
        app = job if kind == "OwnStates" else job.optimizer
        dcp.load({"app": app}, checkpoint_id=f"{folder}/{kind}", process_group=harness.group())
        found.append(job.values())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (with_poplar(1, FOUR), with_poplar(1, FOUR)),
        (with_poplar(0, (0.5, 0.5)), with_poplar(3, (0.0, 0.7, 0.3))),
        (with_poplar(3, (0.0, 0.7, 0.3)), with_poplar(2, (0.2, 0.8))),
    ],
    ids=lambda way: way.name,
)
def test_states_of_the_objects_themselves_move_between_plans(
    ranks: Pool, first: Way, second: Way, dtype: torch.dtype, tmp_path: Path
) -> None:
    spec = ModelSpec(two_groups=True, unused=dtype is torch.float32, dtype=dtype)
    recipe = replace(RECIPE, spec=spec)
    saved = ranks.run(save_own_states, first, recipe, str(tmp_path), ranks=first.ranks)[0]
    both, optimizer = ranks.run(load_own_states, second, recipe, str(tmp_path), ranks=second.ranks)[
        0
    ]
    assert_same_bits(both, saved)
    state = {name for name in saved if name.endswith((".exp_avg", ".exp_avg_sq", ".step"))}
    assert state
    assert_same_bits(
        {name: optimizer[name] for name in state}, {name: saved[name] for name in state}
    )


def gather_whole_states(way: Way, recipe: Recipe) -> None:
    job = Job(way, recipe, StateDictOptions())
    job.take_step(0)
    expected = [job.optimizer.full_state_dict(rank) for rank in range(harness.size())]
    mine: Any = expected[harness.rank()]
    parameters = training.whole_parameters(job.model, job.optimizer)
    names = [name for group in mine["param_groups"] for name in group["param_names"]]
    named = {names[index]: values for index, values in mine["state"].items()}
    for flat in (True, False):
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
        model, optim = get_state_dict(job.model, job.optimizer, options=options)
        assert_same_bits({name: model[name] for name in parameters}, parameters)
        for name, values in named.items():
            for key, value in values.items():
                found = optim[f"state.{name}.{key}"] if flat else optim["state"][name][key]
                assert type(found) is Tensor, (name, key)
                assert torch.equal(found, value), (name, key)
    on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_on_first, optim_on_first = get_state_dict(job.model, job.optimizer, options=on_first)
    assert model_on_first.keys() == (model.keys() if torch.distributed.get_rank() == 0 else set())
    if model_on_first:
        assert all(torch.equal(model_on_first[name].to(v.device), v) for name, v in model.items())
        assert optim_on_first["state"].keys() == optim["state"].keys()
    part = next(iter(job.model.state_dict().values()))
    whole = part.full_tensor() if isinstance(part, ShardTensor) else part
    assert torch.equal(whole, next(iter(parameters.values())))
    before, (model, optim) = job.values(), copy.deepcopy((model, optim))  # views at stage 0
    job.take_step(1)
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=model,
        optim_state_dict=optim,
        options=options,
    )
    assert_same_bits(job.values(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", training.STAGES)
def test_full_state_dict_of_torch_has_whole_tensors(
    ranks: Pool, stage: int, dtype: torch.dtype
) -> None:
    recipe = replace(RECIPE, spec=ModelSpec(two_groups=True, dtype=dtype))
    ranks.run(gather_whole_states, with_poplar(stage, (0.6, 0.0, 0.4)), recipe, ranks=3)


def save_through_torch(way: Way, recipe: Recipe, folder: str) -> dict[str, Tensor]:
    job = Job(way, recipe, StateDictOptions())
    job.take_step(0)
    # Not while it trains: both would use the same process group.
    dcp.async_save(job.state_dict(), checkpoint_id=folder, process_group=harness.group()).result()
    return job.values()


def load_with_poplar(way: Way, recipe: Recipe, before: str, after: str) -> dict[str, Tensor]:
    job = Job(way, recipe, StateDictOptions())
    poplar.load_checkpoint(before, job.optimizer)
    poplar.save_checkpoint(after, job.optimizer)
    return job.values()


def load_through_torch(way: Way, recipe: Recipe, folder: str) -> dict[str, Tensor]:
    job = Job(way, recipe, StateDictOptions())
    state = job.state_dict()
    dcp.load(state, checkpoint_id=folder, process_group=harness.group())
    job.load_state_dict(state)
    return job.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_kinds_of_checkpoints_are_read(
    ranks: Pool, dtype: torch.dtype, tmp_path: Path
) -> None:
    recipe = replace(RECIPE, spec=replace(RECIPE.spec, dtype=dtype))
    one, two, three = str(tmp_path / "one"), str(tmp_path / "two"), with_poplar(3, (0.2, 0.8))
    saved = ranks.run(save_through_torch, with_poplar(2, THREE), recipe, one, ranks=3)[0]
    loaded = ranks.run(load_with_poplar, three, recipe, one, two, ranks=2)[0]
    assert_same_bits(loaded, saved)
    if dtype is torch.float32:  # `save_checkpoint` stores masters as the model's values
        again = ranks.run(load_through_torch, with_poplar(1, (0.9, 0.1)), recipe, two, ranks=2)[0]
        assert_same_bits(again, saved)

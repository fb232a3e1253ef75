"""Units: which parameters travel together, and that they travel while others compute."""

from __future__ import annotations

from collections.abc import Sequence

import models
import pytest
import ranks as harness
import reference
import torch
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from torch import nn
from training import STAGES, Run, assert_close
from watched import Watched

from poplar import Plan, UnitPlan
from poplar.comm import Group
from poplar.plan import STRATEGIES
from poplar.zero import unit as units
from poplar.zero.sharded_gradients import ShardedGradients
from poplar.zero.sharded_parameters import ShardedParameters
from poplar.zero.unit import Member, Unit, build_units, find_blocks, resolve_units

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
SPEC = ModelSpec(tied=True, frozen=True)
EVEN = (0.25,) * 4


def built(model: nn.Module, names: Sequence[str], *, merge: str = "none") -> dict[str, list[str]]:
    """Parameter names by unit."""
    return {
        unit.name: [name for flat in unit.flats for name in flat.names]
        for unit in units_of(model, names, merge=merge)
    }


def units_of(
    model: nn.Module, names: Sequence[str] = BLOCKS, merge: str = "none"
) -> Sequence[Unit]:
    members = [
        Member(name, parameter, 0, parameter.requires_grad, parameter.dtype)
        for name, parameter in model.named_parameters()
    ]
    return build_units(model, members, names, merge=merge)


def test_repeated_blocks_are_found() -> None:
    assert find_blocks(models.build(SPEC)) == BLOCKS


def test_blocks_inside_blocks_are_not_units_of_their_own() -> None:
    inner = [nn.ModuleList(nn.Linear(3, 3) for _ in range(2)) for _ in range(2)]
    model = nn.ModuleDict({"stages": nn.ModuleList(inner), "head": nn.Linear(3, 1)})
    assert find_blocks(model) == ["stages.0", "stages.1"]


def test_a_model_without_repetition_is_one_unit() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.LayerNorm(3))
    assert list(built(model, find_blocks(model))) == ["root"]


def test_units_can_be_named_given_as_modules_or_as_classes() -> None:
    model = models.build(SPEC)
    for given in (BLOCKS, list(model.blocks), [models.Block], [*BLOCKS[:2], model.blocks[2]]):
        assert resolve_units(model, given) == BLOCKS


@pytest.mark.parametrize("given", [["blocks.7"], [nn.Linear(1, 1)], [nn.Conv2d]])
def test_a_unit_that_the_model_does_not_have_is_refused(given: list[object]) -> None:
    with pytest.raises(ValueError, match="not in the model; give module names"):
        resolve_units(models.build(SPEC), given)


def test_nested_units_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks\.1' lies inside 'blocks'"):
        resolve_units(models.build(SPEC), ["blocks", "blocks.1"])


def test_a_parameter_that_two_units_share_belongs_to_the_root() -> None:
    model = models.build(ModelSpec())
    model.blocks[2].up.weight = model.blocks[0].up.weight
    found = built(model, BLOCKS)
    assert "blocks.0.up.weight" in found["root"]
    assert not any("up.weight" in name for name in found["blocks.0"] + found["blocks.2"])


def test_every_parameter_travels_exactly_once() -> None:
    model = models.build(SPEC)
    for merge in ("none", "blocks", "all"):
        names = [name for inside in built(model, BLOCKS, merge=merge).values() for name in inside]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_small_blocks_are_gathered_together_but_never_with_the_root() -> None:
    found = built(models.build(SPEC), BLOCKS, merge="blocks")
    assert list(found) == ["root", "blocks.0..blocks.2"]


def test_blocks_are_gathered_together_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build(ModelSpec())
    block = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    monkeypatch.setattr(units, "MERGED_UNIT_BYTES", 2 * block)
    assert list(built(model, BLOCKS, merge="blocks")) == ["root", "blocks.0..blocks.1", "blocks.2"]


def test_large_units_are_cut_into_several_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "MAX_FLAT_BYTES", 8000)
    model = models.build(ModelSpec())
    members = [Member(name, p, 0, True, p.dtype) for name, p in model.named_parameters()]
    for unit in build_units(model, members, BLOCKS, merge="none"):
        assert len(unit.flats) > 1
        for flat in unit.flats:
            assert len(flat.parameters) == 1 or 4 * sum(p.numel() for p in flat.parameters) <= 8000


def test_parameters_of_one_group_lie_side_by_side() -> None:
    """So that a rank's part of a group is one stretch, which the inner optimizer takes as one."""
    model = models.build(ModelSpec())
    members = [
        Member(name, p, index % 3, True, p.dtype)
        for index, (name, p) in enumerate(model.named_parameters())
    ]
    for unit in build_units(model, members, BLOCKS, merge="none"):
        for flat in unit.flats:
            assert list(flat.groups) == sorted(flat.groups)
            assert all(offset % 64 == 0 for offset in flat.offsets)


# On ranks


@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_may_have_shares_of_its_own(ranks: Pool, stage: int) -> None:
    own = (
        UnitPlan("blocks.1", STRATEGIES[stage], shares=(0.0, 0.0, 0.9, 0.1)),
        UnitPlan("root", STRATEGIES[stage], shares=(1.0, 0.0, 0.0, 0.0)),
    )
    plan = Plan(stage=stage, global_batch=12, micro_batches=((3,),) * 4, shares=EVEN, units=own)
    recipe = Recipe(max_norm=0.5)
    for trajectory in ranks.run(training.train, Run(recipe, plan)):
        assert_close(trajectory.parameters, reference.train(recipe).parameters)


def watch_a_step(run: Run) -> list[str]:
    """Collectives as they are issued, between the blocks' forwards and backwards."""
    comm = Watched(Group.of(harness.group(), None))
    units.MAX_FLAT_BYTES, before = 1, units.MAX_FLAT_BYTES  # small blocks travel alone
    try:
        run.engine["communicator"] = comm  # type: ignore[index]
        model, optimizer = training.prepare(run)
    finally:
        units.MAX_FLAT_BYTES = before
    training.take_step(run, model, optimizer, 0)
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(
            lambda *_, index=index: comm.events.append(f"forward {index} ends")
        )
        block.up.weight.register_post_accumulate_grad_hook(
            lambda _, index=index: comm.events.append(f"backward {index} in the middle")
        )
    comm.events.clear()
    training.take_step(run, model, optimizer, 1)
    return comm.events


def run_of(stage: int) -> Run:
    plan = Plan(stage=stage, global_batch=12, micro_batches=((3,),) * 4, shares=EVEN)
    return Run(Recipe(batches=(12, 12)), plan, engine={})


@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_is_reduced_while_the_next_is_in_its_backward(ranks: Pool, stage: int) -> None:
    for events in ranks.run(watch_a_step, run_of(stage)):
        for block in (2, 1):
            reduced = min(
                place
                for place, event in enumerate(events)
                if event.startswith("the reduction") and f"blocks.{block}" in event
            )
            assert reduced < events.index(f"backward {block - 1} in the middle"), events


def test_at_stage_0_what_is_reduced_is_gathered_under_the_next_reductions(ranks: Pool) -> None:
    for events in ranks.run(watch_a_step, run_of(0)):
        issued = [event for event in events if event.startswith("the ")]
        reduced = named(issued, "the reduction of unit ")
        assert named(issued, "the gradients of ") == reduced
        assert len(reduced) > 3
        gathers, reductions = (
            [place for place, event in enumerate(issued) if event.startswith(head)]
            for head in ("the gradients of ", "the reduction of ")
        )
        for number, place in enumerate(gathers):
            assert reductions[min(number + 1, len(reductions) - 1)] < place
            assert number + 2 >= len(reductions) or place < reductions[number + 2]


def named(events: list[str], head: str) -> list[str]:
    return [event.removeprefix(head) for event in events if event.startswith(head)]


@pytest.mark.parametrize("strategy", [ShardedGradients, ShardedParameters])
def test_a_units_reductions_may_all_run_under_the_backward_of_the_next(
    monkeypatch: pytest.MonkeyPatch, strategy: type[ShardedGradients]
) -> None:
    one = strategy(None, torch.float32)  # type: ignore[arg-type]
    one.prepare(units_of(models.build(ModelSpec())))
    assert one.max_in_flight == 2
    monkeypatch.setattr(units, "MAX_FLAT_BYTES", 8000)
    in_parts = units_of(models.build(ModelSpec()))
    one.prepare(in_parts)
    assert one.max_in_flight == 1 + max(len(unit.trained) for unit in in_parts) > 2


def test_a_unit_is_gathered_while_the_one_before_it_computes(ranks: Pool) -> None:
    for events in ranks.run(watch_a_step, run_of(3)):
        for block in (1, 2):
            gathered = events.index(f"the unshard of unit blocks.{block}")
            assert gathered < events.index(f"forward {block - 1} ends"), events
        for block in (1, 0):
            again = f"the unshard of unit blocks.{block}"
            last = max(place for place, event in enumerate(events) if event == again)
            assert last < events.index(f"backward {block + 1} in the middle"), events


def test_all_ranks_issue_the_same_collectives_in_the_same_order(ranks: Pool) -> None:
    for stage in STAGES:
        first, *others = (
            [event for event in events if event.startswith("the ")]
            for events in ranks.run(watch_a_step, run_of(stage))
        )
        assert all(other == first for other in others)


def test_gathered_values_are_given_back(ranks: Pool) -> None:
    """Between uses a parameter has its shape, and NaN for every value: loud, and no crash."""
    for shapes, empty in ranks.run(look_between_steps, run_of(3)):
        assert shapes
        assert empty


def look_between_steps(run: Run) -> tuple[bool, bool]:
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    plain = models.build(run.recipe.spec)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    shapes = all(mine.shape == theirs.shape for mine, theirs in pairs)
    return shapes, all(bool(torch.isnan(mine).all()) for mine, _ in pairs)

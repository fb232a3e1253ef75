"""Units: how parameters are grouped, and that their communication overlaps with compute."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import models
import pytest
import ranks as harness
import reference
import torch
import training
from communicators import RecordingCommunicator
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from torch import nn
from training import STAGES, Run, assert_close

from poplar import Plan, UnitPlan
from poplar.comm import Group
from poplar.zero import unit as units
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.stages.sharded_gradients import ShardedGradients
from poplar.zero.stages.sharded_parameters import ShardedParameters
from poplar.zero.unit import Member, Unit, build_units, find_blocks, resolve_units

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
SPEC = ModelSpec(tied=True, frozen=True)
EVEN = (0.25,) * 4


def parameters_by_unit(
    model: nn.Module, names: Sequence[str], *, merge: str = "none"
) -> dict[str, list[str]]:
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


def test_repeated_blocks_become_units() -> None:
    assert find_blocks(models.build(SPEC)) == BLOCKS


def test_nested_blocks_belong_to_the_outer_unit() -> None:
    inner = [nn.Sequential(*(nn.Linear(3, 3) for _ in range(2))) for _ in range(2)]
    model = nn.ModuleDict({"stages": nn.ModuleList(inner), "head": nn.Linear(3, 1)})
    assert find_blocks(model) == ["stages.0", "stages.1"]


@pytest.mark.parametrize("container", [list, dict])
def test_parts_of_layers_without_a_forward_are_the_blocks(container: type) -> None:
    def layer(*parts: nn.Module) -> nn.Module:
        if container is list:
            return nn.ModuleList(parts)
        return nn.ModuleDict({str(number): part for number, part in enumerate(parts)})

    layers = [layer(nn.LayerNorm(3), nn.ModuleList([nn.Bilinear(3, 3, 3)])) for _ in range(2)]
    scales = [nn.ParameterList([torch.ones(3)]) for _ in range(2)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "scales": nn.ModuleList(scales)})
    parts = [f"layers.{number}.{part}" for number in (0, 1) for part in ("0", "1.0")]
    assert find_blocks(model) == parts
    with pytest.raises(ValueError, match=r"'layers\.0' is a Module\w+, which has no forward"):
        resolve_units(model, [layers[0]])


@pytest.mark.parametrize("first", ["blocks", "others"])
@pytest.mark.parametrize("kind", ["all", "parts", "model"])
def test_blocks_that_are_registered_twice_are_units_once(kind: str, first: str) -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
    others = {
        "all": nn.ModuleList([*blocks, nn.LayerNorm(4)]),
        "parts": nn.ModuleList(block[0] for block in blocks),
        "model": nn.Module(),
    }[kind]
    if kind == "model":
        others.layers = blocks
    model = nn.Module()
    for name in (first, "blocks", "others"):
        setattr(model, name, {"blocks": blocks, "others": others}[name])
    modules = dict(model.named_modules())
    assert [modules[name] for name in find_blocks(model)] == list(blocks)


def test_model_without_repeated_blocks_is_one_unit() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.LayerNorm(3))
    assert list(parameters_by_unit(model, find_blocks(model))) == ["root"]


def test_units_can_be_names_modules_or_classes() -> None:
    model = models.build(SPEC)
    for given in (BLOCKS, list(model.blocks), [models.Block], [*BLOCKS[:2], model.blocks[2]]):
        assert resolve_units(model, given) == BLOCKS


@pytest.mark.parametrize("given", [["blocks.7"], [nn.Linear(1, 1)], [nn.Conv2d]])
def test_unknown_unit_raises(given: list[object]) -> None:
    with pytest.raises(ValueError, match="not in the model; give module names"):
        resolve_units(models.build(SPEC), given)


def test_nested_units_raise() -> None:
    with pytest.raises(ValueError, match=r"'blocks\.1' lies inside 'blocks'"):
        resolve_units(models.build(SPEC), ["blocks", "blocks.1"])


def test_tied_parameter_of_two_units_belongs_to_the_root() -> None:
    model = models.build(ModelSpec())
    model.blocks[2].up.weight = model.blocks[0].up.weight
    found = parameters_by_unit(model, BLOCKS)
    assert "blocks.0.up.weight" in found["root"]
    assert not any("up.weight" in name for name in found["blocks.0"] + found["blocks.2"])


def test_every_parameter_is_in_exactly_one_unit() -> None:
    model = models.build(SPEC)
    for merge in ("none", "blocks", "all"):
        names = [
            name
            for inside in parameters_by_unit(model, BLOCKS, merge=merge).values()
            for name in inside
        ]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_small_blocks_are_merged_but_not_with_the_root() -> None:
    found = parameters_by_unit(models.build(SPEC), BLOCKS, merge="blocks")
    assert list(found) == ["root", "blocks.0..blocks.2"]


def test_blocks_are_merged_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build(ModelSpec())
    block = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    monkeypatch.setattr(units, "MERGED_UNIT_BYTES", 2 * block)
    assert list(parameters_by_unit(model, BLOCKS, merge="blocks")) == [
        "root",
        "blocks.0..blocks.1",
        "blocks.2",
    ]


def test_large_units_have_several_flat_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "MAX_FLAT_BYTES", 8000)
    model = models.build(ModelSpec())
    members = [Member(name, p, 0, True, p.dtype) for name, p in model.named_parameters()]
    for unit in build_units(model, members, BLOCKS, merge="none"):
        assert len(unit.flats) > 1
        for flat in unit.flats:
            size = 4 * sum(p.numel() for p in flat.parameters)
            assert size <= 8000 * (1 + 1 / 16) or _is_one_large_parameter(flat)


def test_small_units_are_merged_up_to_the_size_of_their_flat_parameters() -> None:
    model = models.build(ModelSpec())
    members = [Member(name, p, 0, True, p.dtype) for name, p in model.named_parameters()]
    block = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    merged = build_units(model, members, BLOCKS, merge="all", max_flat_bytes=2 * block)
    assert [unit.name for unit in merged][-1] == "blocks.1..blocks.2"
    assert len(merged) < len(BLOCKS) + 1


def _is_one_large_parameter(flat: FlatParameter) -> bool:
    """Beside others that are not worth a collective of their own."""
    sizes = sorted(4 * parameter.numel() for parameter in flat.parameters)
    return sum(sizes[:-1]) <= 8000 / 16


def test_parameters_of_one_group_are_adjacent() -> None:
    """A rank's part of a group is then one range, which the inner optimizer gets as one tensor."""
    model = models.build(ModelSpec())
    members = [
        Member(name, p, index % 3, True, p.dtype)
        for index, (name, p) in enumerate(model.named_parameters())
    ]
    for unit in build_units(model, members, BLOCKS, merge="none"):
        for flat in unit.flats:
            assert list(flat.groups) == sorted(flat.groups)
            assert all(offset % 64 == 0 for offset in flat.offsets)


# On several ranks


@pytest.mark.parametrize("stage", STAGES)
def test_unit_may_have_its_own_shares(ranks: Pool, stage: int) -> None:
    own = (
        UnitPlan("blocks.1", shares=(0.0, 0.0, 0.9, 0.1)),
        UnitPlan("root", shares=(1.0, 0.0, 0.0, 0.0)),
    )
    plan = Plan(stage=stage, global_batch=12, micro_batches=((3,),) * 4, shares=EVEN, units=own)
    recipe = Recipe(max_norm=0.5)
    for trajectory in ranks.run(training.train, Run(recipe, plan)):
        assert_close(trajectory.parameters, reference.train(recipe).parameters)


def record_step(run: Run, frozen: Sequence[str] = ()) -> list[str]:
    """The issued collectives, between the forwards and backwards of the blocks.

    Parameters with a part of their name in `frozen` are frozen in the step before.
    """
    comm = RecordingCommunicator(Group.of(harness.group(), None))
    units.MAX_FLAT_BYTES, before = 1, units.MAX_FLAT_BYTES  # one flat parameter per parameter
    try:
        run.engine["communicator"] = comm  # type: ignore[index]
        model, optimizer = training.prepare(run)
    finally:
        units.MAX_FLAT_BYTES = before
    named = list(model.named_parameters())
    chosen = [p for name, p in named if any(part in name for part in frozen)]
    for parameter in chosen:
        parameter.requires_grad_(False)
    training.take_step(run, model, optimizer, 0)
    for parameter in chosen:
        parameter.requires_grad_(True)
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


BACKBONE = ("embedding", "positions", "blocks")


@pytest.mark.parametrize(
    ("stage", "frozen"), [(s, f) for s in STAGES for f in ((), BACKBONE)] + [(3, ("blocks",))]
)
def test_reduction_overlaps_with_next_backward(
    ranks: Pool, stage: int, frozen: tuple[str, ...]
) -> None:
    """Also in the step after parameters have been unfrozen."""
    for events in ranks.run(record_step, run_of(stage), frozen):
        for block in (2, 1):
            reduced = min(
                place
                for place, event in enumerate(events)
                if event.startswith("the reduction") and f"blocks.{block}" in event
            )
            assert reduced < events.index(f"backward {block - 1} in the middle"), events


def test_stage_0_all_gather_overlaps_with_next_reductions(ranks: Pool) -> None:
    for events in ranks.run(record_step, run_of(0)):
        issued = [event for event in events if event.startswith("the ")]
        reduced = named(issued, "the reduction of unit ")
        assert named(issued, "the gradients of ") == reduced
        assert len(reduced) > 3
        all_gathers, reductions = (
            [place for place, event in enumerate(issued) if event.startswith(head)]
            for head in ("the gradients of ", "the reduction of ")
        )
        for number, place in enumerate(all_gathers):
            assert reductions[min(number + 1, len(reductions) - 1)] < place
            assert number + 2 >= len(reductions) or place < reductions[number + 2]


def named(events: list[str], head: str) -> list[str]:
    return [event.removeprefix(head) for event in events if event.startswith(head)]


@pytest.mark.parametrize("strategy", [ShardedGradients, ShardedParameters])
def test_all_reductions_of_a_unit_may_be_in_flight(
    monkeypatch: pytest.MonkeyPatch, strategy: type[ShardedGradients]
) -> None:
    comm = mock.Mock(waits_on_stream=False)
    one = strategy(comm, torch.float32, torch.device("cpu"))
    one.prepare(units_of(models.build(ModelSpec())))
    assert one.reductions.limit == 2
    monkeypatch.setattr(units, "MAX_FLAT_BYTES", 8000)
    in_parts = units_of(models.build(ModelSpec()))
    one.prepare(in_parts)
    assert one.reductions.limit == 1 + max(len(unit.trained) for unit in in_parts) > 2


def test_unshard_overlaps_with_previous_unit(ranks: Pool) -> None:
    for events in ranks.run(record_step, run_of(3)):
        for block in (1, 2):
            unsharded = events.index(f"the unshard of unit blocks.{block}")
            assert unsharded < events.index(f"forward {block - 1} ends"), events
        for block in (1, 0):
            again = f"the unshard of unit blocks.{block}"
            last = max(place for place, event in enumerate(events) if event == again)
            assert last < events.index(f"backward {block + 1} in the middle"), events

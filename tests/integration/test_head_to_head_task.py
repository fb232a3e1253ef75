"""Every engine gets the same weights and samples."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from head_to_head import task as comparison_task
from head_to_head.task import MODELS, SIZES, Batch, Task
from text import ByteWindows

from poplar import Plan

TINY = Task(size="tiny", context=16, global_batch=8)

PLANS = {
    "one rank": Plan.manual("8", stage=0),
    "even": Plan.manual("2,2,2,2", stage=0),
    "uneven": Plan.manual("5,2,1", stage=3),
    "passes": Plan.manual("3,1", stage=2, passes=2),
    "a rank without samples": Plan.manual("6,0,2", stage=1, shares=(0.5, 0.5, 0.0)),
}

FIELDS = {"llama": {"input", "target"}, "encoder": {"input", "places", "target"}}


@pytest.fixture(params=MODELS)
def task(request: pytest.FixtureRequest) -> Task:
    return replace(TINY, model=request.param)


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """125 samples, so that an epoch has 15 steps and leaves some samples out."""
    drawn = torch.randint(256, (125 * 16 + 1,), generator=torch.Generator().manual_seed(0))
    windows = ByteWindows(drawn.byte(), 16)
    monkeypatch.setattr(comparison_task, "load_text", lambda context, limit: (windows, windows))


def global_batches(task: Task, plan: Plan, first: int, stop: int) -> list[Batch]:
    """The parts of all ranks, joined in rank order, of steps `first` to `stop`."""
    streams = [
        itertools.islice(task.batches(plan, rank), first, stop) for rank in range(plan.world_size)
    ]
    steps = []
    for subset_configurations in zip(*streams, strict=True):
        held = [part for part in subset_configurations if part is not None]
        steps.append({name: torch.cat([part[name] for part in held]) for name in held[0]})
    return steps


def assert_same_batches(batches: list[Batch], expected: list[Batch]) -> None:
    for step, (batch, wanted) in enumerate(zip(batches, expected, strict=True)):
        assert batch.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(batch[name], wanted[name]), f"step {step}: {name}"


@pytest.mark.parametrize("name", PLANS)
def test_global_batches_do_not_depend_on_the_plan(task, name):
    expected = global_batches(task, PLANS["one rank"], 0, 3)
    assert all(batch["input"].shape == (8, 16) for batch in expected)
    assert_same_batches(global_batches(task, PLANS[name], 0, 3), expected)


@pytest.mark.usefixtures("short_text")
@pytest.mark.parametrize("name", PLANS)
def test_epochs_do_not_depend_on_the_plan(task, name):
    length = len(task.data()) // 8
    expected = global_batches(task, PLANS["one rank"], length - 1, length + 2)
    assert_same_batches(global_batches(task, PLANS[name], length - 1, length + 2), expected)


@pytest.mark.usefixtures("short_text")
def test_epoch_has_each_sample_at_most_once_in_a_new_order(task):
    data, seen = task.data(), []
    there_are = Counter(row_of(data[index]["input"]) for index in range(len(data)))
    length = len(data) // 8
    for epoch in (0, 1):
        batches = global_batches(task, PLANS["one rank"], epoch * length, (epoch + 1) * length)
        seen.append([row_of(row) for batch in batches for row in batch["input"]])
        assert Counter(seen[epoch]) <= there_are
    assert seen[0] != seen[1]


def row_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.tolist())


def test_ranks_get_the_samples_of_the_plan(task):
    for plan in PLANS.values():
        for rank in range(plan.world_size):
            batch = next(task.batches(plan, rank))
            if plan.samples(rank) == 0:
                assert batch is None
            else:
                assert {len(tensor) for tensor in batch.values()} == {plan.samples(rank)}


def test_weights_depend_only_on_the_seed(task):
    first = weights(task)
    torch.rand(3)  # other uses of the random state in between
    again = weights(task)
    assert first.keys() == again.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)
    other = weights(replace(task, seed=1))
    assert not torch.equal(other["embedding.weight"], first["embedding.weight"])


def weights(task: Task) -> dict[str, Tensor]:
    return dict(task.new_model().named_parameters())


def test_example_is_a_batch_of_the_first_samples(task):
    data, batch = task.data(), task.example(5)
    assert set(batch) == FIELDS[task.model]
    for index in range(5):
        for name, tensor in data[index].items():
            assert torch.equal(batch[name][index], tensor)
    assert task.loss_fn(task.new_model(), batch).requires_grad


def test_model_accepts_any_context_length(task):
    for context in (7, 100):
        longer = replace(task, context=context)
        batch = longer.example(2)
        assert batch["input"].shape == (2, context)
        assert longer.loss_fn(longer.new_model(), batch).isfinite()


def test_every_size_has_its_number_of_blocks():
    assert set(MODELS) == {"llama", "encoder"}
    assert list(SIZES["llama"]) == list(SIZES["encoder"])
    for model, size in itertools.product(MODELS, SIZES["llama"]):
        task = Task(model=model, size=size)
        with torch.device("meta"):
            blocks = task.blocks(task.new_model())
        assert len(blocks) == SIZES[model][size].layers


def test_task_can_be_pickled(task):
    assert pickle.loads(pickle.dumps(task)) == task


def test_unknown_models_and_sizes_are_errors():
    with pytest.raises(ValueError, match="'bert' must be one of llama, encoder"):
        Task(model="bert")
    with pytest.raises(ValueError, match="'huge' of the encoder must be one of tiny, demo, small"):
        Task(model="encoder", size="huge")

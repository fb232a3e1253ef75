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

from head_to_head import workloads
from head_to_head.task import MODELS, Task
from head_to_head.workloads import WORKLOADS, Batch
from images import Images
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

TEXTS = ("llama", "encoder", "mixture")
IMAGES = ("vgg", "vit")
FIELDS = {model: {"input", "target"} for model in MODELS}
FIELDS["encoder"] = FIELDS["mixture"] = {"input", "places", "target"}


@pytest.fixture(params=MODELS)
def task(request: pytest.FixtureRequest) -> Task:
    return replace(TINY, model=request.param)


@pytest.fixture
def short_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """125 samples, so that an epoch has 15 steps and leaves some samples out."""
    drawn = torch.randint(256, (125 * 16 + 1,), generator=torch.Generator().manual_seed(0))
    windows = ByteWindows(drawn.byte(), 16)
    monkeypatch.setattr(workloads, "load_text", lambda context, limit: (windows, windows))
    monkeypatch.setattr(workloads.images, "Images", lambda seed: Images(125, seed))


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
    assert all(len(batch["input"]) == 8 for batch in expected)
    assert_same_batches(global_batches(task, PLANS[name], 0, 3), expected)


@pytest.mark.usefixtures("short_data")
@pytest.mark.parametrize("name", PLANS)
def test_epochs_do_not_depend_on_the_plan(task, name):
    length = len(task.data()) // 8
    expected = global_batches(task, PLANS["one rank"], length - 1, length + 2)
    assert_same_batches(global_batches(task, PLANS[name], length - 1, length + 2), expected)


@pytest.mark.usefixtures("short_data")
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
    return tuple(tensor.flatten().tolist())


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
    assert any(not torch.equal(other[name], first[name]) for name in first)


def weights(task: Task) -> dict[str, Tensor]:
    return dict(task.new_model().named_parameters())


def test_example_is_a_batch_of_the_first_samples(task):
    data, batch = task.data(), task.example(5)
    assert set(batch) == FIELDS[task.model]
    for index in range(5):
        for name, tensor in data[index].items():
            assert torch.equal(batch[name][index], tensor)
    assert task.loss_fn(task.new_model(), batch).requires_grad


@pytest.mark.parametrize("model", TEXTS)
def test_text_models_accept_any_context_length(model):
    task = replace(TINY, model=model)
    for context in (7, 100):
        longer = replace(task, context=context)
        batch = longer.example(2)
        assert batch["input"].shape == (2, context)
        assert longer.loss_fn(longer.new_model(), batch).isfinite()


def test_every_size_has_several_blocks():
    assert {*MODELS} == {*TEXTS, *IMAGES}
    for model, workload in WORKLOADS.items():
        for size in workload.sizes:
            task = Task(model=model, size=size)
            with torch.device("meta"):
                blocks = task.blocks(task.new_model())
            assert len(blocks) >= (1 if model == "mixture" else 2)
            assert all(next(block.parameters(), None) is not None for block in blocks)


def test_vgg19_has_the_layers_of_torchvision():
    """Without its classes: 139.6 million parameters, 119.6 million in the linear layers."""
    with torch.device("meta"):
        model = Task(model="vgg", size="vgg19").new_model()
    linear = [model.first, model.second, model.head]
    assert sum(p.numel() for p in model.parameters()) == 139_611_210
    assert sum(p.numel() for layer in linear for p in layer.parameters()) == 119_586_826


def test_losses_and_gradients_are_means_over_samples(task):
    """Also with experts: tokens of one sample share their capacity, so no other sample matters."""
    model = task.new_model().double()
    batch = {
        name: value.double() if value.is_floating_point() else value
        for name, value in task.example(5).items()
    }
    parts = [(5, batch), *((size, part) for size, part in cut(batch, 2, 3))]
    results = []
    for size, part in parts:
        loss = task.loss_fn(model, part)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append([size / 5 * value for value in (loss, *gradients)])
    whole, first, second = results
    for value, one, other in zip(whole, first, second, strict=True):
        torch.testing.assert_close(one + other, value, rtol=1e-5, atol=1e-8)


def cut(batch: Batch, *sizes: int) -> list[tuple[int, Batch]]:
    split = {name: value.split(sizes) for name, value in batch.items()}
    return [
        (size, {name: parts[number] for name, parts in split.items()})
        for number, size in enumerate(sizes)
    ]


def test_task_can_be_pickled(task):
    assert pickle.loads(pickle.dumps(task)) == task


def test_unknown_models_and_sizes_are_errors():
    with pytest.raises(ValueError, match="'bert' must be one of llama, encoder, mixture, vgg"):
        Task(model="bert")
    with pytest.raises(ValueError, match="'huge' of the encoder must be one of tiny, demo, small"):
        Task(model="encoder", size="huge")

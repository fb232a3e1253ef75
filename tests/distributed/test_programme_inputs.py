"""A step of a programme reads the batch, buffers and modes as they are in that step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.nn import functional as F
from virtual_programme import following

import poplar
from poplar.data import CollateMicroBatches
from poplar.data.micro_batch_collation import MicroBatches
from poplar.programmes.graph.placement import Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run.checked_export import CheckedExport
from poplar.programmes.run.distributed_training import DistributedTraining
from poplar.programmes.search.composition import batch_placements, data_parallel

SAMPLES, WIDTH = 6, 4
OPTIONS = {"lr": 1e-2, "eps": 1e-4}


class Changing(nn.Module):
    """Depends on a buffer, on its mode, and on an attribute that is a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu()) * self.scale * self.factor
        return y + y.square().mean() if self.training else y


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"]) * batch["beta"]


def global_batch(step: int) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=draws)
    return {"x": x, "y": y, "beta": 1.0 + step}


def export(model: nn.Module) -> CheckedExport:
    return CheckedExport(model, loss_of, global_batch(0), SAMPLES)


def programme() -> Programme:
    graph = export(Changing()).exported.graph
    placed = {graph.parameters["up.weight"].name: Sharded(0)}
    return following(graph, (2, 1), {**batch_placements(graph), **placed})


def distributed(
    given: Programme, model: nn.Module, loss_fn: Any = loss_of, example: Any = None
) -> DistributedTraining:
    return poplar.distribute(
        model,
        loss_fn,
        global_batch(0) if example is None else example,
        global_batch=SAMPLES,
        programme=given,
        process_group=harness.group(),
        **OPTIONS,
    )


def own_part(training: DistributedTraining, batch: dict[str, Any]) -> dict[str, Any]:
    rank = harness.rank()
    start, samples = training.plan.offset(rank), training.plan.samples(rank)
    return {k: v if k == "beta" else v[start : start + samples] for k, v in batch.items()}


def collated(batch: dict[str, Any]) -> MicroBatches:
    """The same batch, as a loader with `CollateMicroBatches` has it."""

    def collate(samples: list[Any]) -> dict[str, Any]:
        x, y = map(torch.stack, zip(*samples, strict=True))
        return {**batch, "x": x, "y": y}

    return CollateMicroBatches(collate)(list(zip(batch["x"], batch["y"], strict=True)))


def change(model: Any, step: int) -> None:
    """Before a step."""
    if step == 2:
        model.scale.mul_(2.0)
    elif step == 3:
        model.scale = torch.full((WIDTH,), 0.5)


def train(given: Programme) -> tuple[list[float], list[Tensor], list[str]]:
    """Losses of steps and of an evaluation; values; errors after other changes."""
    model = Changing()
    training = distributed(given, model)

    def own(step: int) -> dict[str, Any]:
        return own_part(training, global_batch(step))

    losses = []
    for step in range(4):
        change(model, step)
        batch: Any = collated(own(step)) if step == 1 else own(step)
        losses.append(float(training.train_step(batch).loss))
    model.down.eval()
    losses.append(training.evaluate([own(0), collated(own(1))]))
    assert [module.training for module in model.modules()] == [True, True, False]
    model.down.train()
    with harness.catching() as caught:
        training.train_step({**own(4), "beta": 1.0 + harness.rank()})
    messages = [failure.message for failure in caught]
    model.eval()
    with harness.catching() as caught:
        training.train_step(own(4))
    messages += [failure.message for failure in caught]
    model.train()
    model.factor = 1.5
    with harness.catching() as caught:
        training.train_step(own(4))
    training.release()
    messages += [failure.message for failure in caught]
    return losses, [p.detach().clone() for p in model.parameters()], messages


def train_in_one_process() -> tuple[list[float], list[Tensor]]:
    model = Changing()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)

    def steps() -> Iterator[float]:
        for step in range(4):
            change(model, step)
            optimizer.zero_grad()
            loss = loss_of(model, global_batch(step))
            loss.backward()
            optimizer.step()
            yield float(loss.detach())
        model.eval()
        yield sum(float(loss_of(model, global_batch(step)).detach()) for step in range(2)) / 2

    return list(steps()), [p.detach() for p in model.parameters()]


def test_steps_read_what_has_changed_or_raise(ranks: Pool) -> None:
    expected, values = train_in_one_process()
    for rank, (losses, own, messages) in enumerate(ranks.run(train, programme(), ranks=2)):
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own, values, rtol=1e-4, atol=1e-5)
        unequal, in_other_mode, unlike = messages
        assert "different numbers at ['beta']: [1.0, 2.0]" in unequal, rank
        assert "after 4 steps, the programme does not compute" in in_other_mode
        assert "after 4 steps, the programme does not compute what loss_fn computes" in unlike
        assert "the graph of torch.export, which keeps Python numbers" in unlike


def whole_shapes_by_step(given: Programme) -> list[int]:
    """For how many parameters each of six steps makes a tensor of the whole shape."""
    training = distributed(given, Changing())
    own = own_part(training, global_batch(0))
    counts = []
    for _ in range(6):
        repeated = mock.Mock(side_effect=training._divided.repeated)
        with mock.patch.object(training._divided, "repeated", repeated):
            training.train_step(own)
        counts.append(repeated.call_count)
    return counts


def test_only_steps_that_compare_need_memory_for_whole_parameters(ranks: Pool) -> None:
    """Those after 0, 1, 2, 4, ... steps."""
    for counts in ranks.run(whole_shapes_by_step, programme(), ranks=2):
        assert counts == [1, 1, 1, 0, 1, 0]


def train_with_own_counts(given: Programme) -> str:
    """As a `collate_fn` that counts the labels of its own part."""
    example = {**global_batch(0), "beta": torch.tensor(1.0)}
    training = distributed(given, Changing().eval(), example=example)
    own = own_part(training, example)
    samples = training.plan.samples(harness.rank())
    training.train_step({**own, "beta": torch.tensor(2.0)})
    with harness.catching() as caught:
        training.train_step({**own, "beta": torch.tensor(float(samples))})
    training.release()
    return caught[0].message


def test_tensors_without_dimensions_must_be_equal_on_all_ranks(ranks: Pool) -> None:
    for message in ranks.run(train_with_own_counts, programme(), ranks=2):
        assert "different numbers at ['beta']: [4.0, 2.0]" in message


def loss_of_tensor(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def train_on_tensors(given: Programme | None) -> list[float]:
    """Losses of three steps whose batch is one tensor; None: in one process."""
    model = Changing().eval()
    batches = [global_batch(step)["x"] for step in range(3)]
    if given is None:
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of_tensor(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
    training = distributed(given, model, loss_of_tensor, batches[0])
    parts = [batch if training.plan.samples(harness.rank()) else None for batch in batches]
    return [training.train_step(part).loss for part in parts]


def test_a_rank_without_samples_needs_no_batch(ranks: Pool) -> None:
    """A batch that is one tensor has no name, and neither has the batch that is missing."""
    checked = CheckedExport(Changing().eval(), loss_of_tensor, global_batch(0)["x"], SAMPLES)
    expected = train_on_tensors(None)
    for ratios in ((1, 0), (0, 1)):
        given = data_parallel(checked.exported.graph, ratios)
        for losses in ranks.run(train_on_tensors, given, ranks=2):
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def train_on_example(given: Programme) -> float:
    """The loss of a step on the example, as in a trial."""
    training = distributed(given, Changing())
    return training.train_step(training._job.example_part(training.plan)).loss


def test_a_rank_without_samples_has_the_numbers_of_the_example(ranks: Pool) -> None:
    graph = export(Changing()).exported.graph
    expected = float(loss_of(Changing(), global_batch(0)).detach())
    for ratios in ((1, 0), (0, 1)):
        for loss in ranks.run(train_on_example, data_parallel(graph, ratios), ranks=2):
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)

"""Images of any sizes are profiled, trained, evaluated and verified: samples that are not rows."""

from __future__ import annotations

from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.utils.data import DataLoader

import poplar
from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan
from poplar.cli.workload import Workload
from poplar.data import CollateMicroBatches
from poplar.tuning.verification import Verification
from poplar.zero.micro_batches import Weight

GLOBAL_BATCH = 12
PLANS = {
    0: Plan(
        stage=0,
        global_batch=GLOBAL_BATCH,
        micro_batches=((1, 2), (3, 3, 1), (), (2,)),
        shares=(0.25,) * 4,
    ),
    3: Plan.manual("2,3,0,1", stage=3, passes=2, shares=(0.5, 0.2, 0.2, 0.1)),
}
Sample = tuple[Tensor, dict[str, Tensor]]
Batch = tuple[tuple[Tensor, ...], tuple[dict[str, Tensor], ...]]


class Detector(nn.Module):
    """The errors of the boxes of each image, from a list of images of any sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features, self.box = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(
        self, images: tuple[Tensor, ...], targets: tuple[dict[str, Tensor], ...]
    ) -> list[Tensor]:
        found = [self.box(self.features(image).relu().mean((1, 2))) for image in images]
        return [
            (own - target["boxes"]).square().mean(1)
            for own, target in zip(found, targets, strict=True)
        ]


def mean_over_images(model: nn.Module, batch: Batch) -> Tensor:
    return torch.stack([errors.mean() for errors in model(*batch)]).mean()


def mean_over_boxes(model: nn.Module, batch: Batch) -> Tensor:
    return torch.cat(model(*batch)).mean()


def boxes(batch: Batch) -> int:
    return sum(len(target["boxes"]) for target in batch[1])


def dataset() -> list[Sample]:
    generator = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    return [
        (
            torch.rand(3, number(4, 12), number(4, 12), generator=generator),
            {"boxes": torch.rand(number(1, 6), 4, generator=generator)},
        )
        for _ in range(2 * GLOBAL_BATCH)
    ]


def collate(samples: list[Sample]) -> Batch:
    """As detection models take them."""
    images, targets = zip(*samples, strict=True)
    return images, targets


def planned_loader(plan: Plan) -> DataLoader[Any]:
    data: Any = dataset()
    sampler = HeteroBatchSampler(len(data), plan)
    return DataLoader(data, batch_sampler=sampler, collate_fn=CollateMicroBatches(collate, plan))


def own_loader(plan: Plan) -> DataLoader[Any]:
    """A part of the dataset for each rank, in batches of other sizes than the plan's."""
    data: Any = dataset()[harness.rank() :: plan.world_size]
    return DataLoader(data, batch_size=5, collate_fn=CollateMicroBatches(collate))


def evaluate(plan: Plan, loader: Any, loss: Any, weight: Weight | None) -> tuple[float, list[int]]:
    """The mean over the dataset, and the samples of each pass."""
    optimizer = HeteroZeroOptimizer(Detector(), torch.optim.SGD, plan=plan, lr=0.1)
    passes = []

    def counted(model: nn.Module, batch: Batch) -> Tensor:
        passes.append(len(batch[0]))
        return loss(model, batch)

    return optimizer.evaluate(counted, loader(plan), weight), passes


@pytest.mark.parametrize(
    ("loss", "weight"),
    [(mean_over_images, None), (mean_over_boxes, boxes)],
    ids=["images", "boxes"],
)
@pytest.mark.parametrize("stage", PLANS)
def test_evaluation_runs_the_micro_batches_of_the_plan(ranks: Pool, stage, loss, weight):
    plan, expected = PLANS[stage], float(loss(Detector(), collate(dataset())).detach())
    for rank, found in enumerate(ranks.run(evaluate, plan, planned_loader, loss, weight)):
        assert found[0] == pytest.approx(expected, rel=1e-5)
        assert found[1] == [size for size in plan.micro_batches[rank] if size] * 2


@pytest.mark.parametrize("stage", PLANS)
def test_evaluation_splits_batches_that_are_larger_than_planned(ranks: Pool, stage):
    """A rank without samples in the plan evaluates each batch whole."""
    plan = PLANS[stage]
    expected = float(mean_over_images(Detector(), collate(dataset())).detach())
    by_rank = ranks.run(evaluate, plan, own_loader, mean_over_images, None)
    for rank, (found, passes) in enumerate(by_rank):
        assert found == pytest.approx(expected, rel=1e-5)
        assert sum(passes) == 6
        assert max(passes) <= (max(plan.micro_batches[rank], default=0) or 5)


def evaluate_without_a_plan() -> tuple[float, list[int]]:
    optimizer = HeteroZeroOptimizer(Detector(), torch.optim.SGD, stage=1, lr=0.1)
    passes = []

    def counted(model: nn.Module, batch: Batch) -> Tensor:
        passes.append(len(batch[0]))
        return mean_over_images(model, batch)

    loader = own_loader(PLANS[0])
    return optimizer.evaluate(counted, loader), passes


def test_evaluation_without_a_plan_runs_batches_whole(ranks: Pool):
    expected = float(mean_over_images(Detector(), collate(dataset())).detach())
    for found, passes in ranks.run(evaluate_without_a_plan):
        assert found == pytest.approx(expected, rel=1e-5)
        assert passes == [5, 1]


def tune_and_train() -> tuple[Plan, str, list[float]]:
    """The plan, the sizes that identify its profile, and the losses of steps."""
    example = CollateMicroBatches(collate)(dataset()[:4])
    tuned = poplar.tune(
        Detector(),
        mean_over_images,
        example,
        global_batch=GLOBAL_BATCH,
        stage=2,
        max_batch=4,
        seconds=0.5,
        cache=False,
        progress=False,
        lr=0.1,
    )
    optimizer = HeteroZeroOptimizer(Detector(), torch.optim.SGD, plan=tuned.plan, lr=0.1)
    loader = planned_loader(tuned.plan)
    losses = [float(optimizer.train_step(mean_over_images, batch).loss) for batch in loader]
    return tuned.plan, tuned.profile.identity["example"], losses


def train_in_one_process() -> tuple[list[float], nn.Module]:
    model, losses = Detector(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: list[Any] = dataset()
    for indices in HeteroBatchSampler(len(data), Plan.manual("12", stage=0), rank=0):
        loss = mean_over_images(model, collate([data[index] for index in indices]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def test_example_without_a_plan_gives_a_plan_to_train_with(ranks: Pool):
    losses, _ = train_in_one_process()
    for plan, shapes, found in ranks.run(tune_and_train):
        assert plan.global_batch == GLOBAL_BATCH
        assert shapes.startswith("4 sizes of samples (")
        torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)


def distribute() -> tuple[str, list[float], float]:
    """Why the training has no programme, and the losses of its steps and of an evaluation."""
    training = poplar.distribute(
        Detector(),
        mean_over_images,
        CollateMicroBatches(collate)(dataset()[:4]),
        global_batch=GLOBAL_BATCH,
        optimizer_class=torch.optim.SGD,
        max_batch=4,
        seconds=0.5,
        cache=False,
        progress=False,
        lr=0.1,
    )
    loader = planned_loader(training.plan)
    losses = [float(training.train_step(batch).loss) for batch in loader]
    return training.reason, losses, training.evaluate(loader)


def test_distribute_trains_by_a_plan(ranks: Pool):
    losses, model = train_in_one_process()
    evaluated = float(mean_over_images(model, collate(dataset())).detach())
    for reason, found, mean in ranks.run(distribute):
        assert "not rows of its tensors" in reason
        torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
        assert mean == pytest.approx(evaluated, rel=1e-4)


def tune_with_a_list() -> str:
    with pytest.raises(ValueError, match="CollateMicroBatches") as raised:
        poplar.autotune(Detector(), mean_over_images, collate(dataset()[:4]), global_batch=12)
    return str(raised.value)


def test_a_list_of_images_is_no_example_and_the_error_names_one(ranks: Pool):
    for message in ranks.run(tune_with_a_list):
        assert "An example batch, for which there is no plan yet, is " in message
        assert "CollateMicroBatches(collate)(samples)" in message


def verify(plan: Plan, other_on: int | None = None) -> Verification:
    data = dataset()[::-1] if harness.rank() == other_on else dataset()
    work = Workload(Detector(), mean_over_images, CollateMicroBatches(collate)(data[:7]))
    return poplar.verify(work.model, work.loss_fn, work.batch_of(GLOBAL_BATCH), plan)


@pytest.mark.parametrize("stage", PLANS)
def test_plan_is_verified_with_repeated_samples_of_an_example(ranks: Pool, stage):
    for outcome in ranks.run(verify, PLANS[stage]):
        assert outcome.ok, str(outcome)
        assert outcome.notes == ()


def verify_another_batch(plan: Plan) -> str:
    with pytest.raises(ValueError, match="another batch") as raised:
        verify(plan, other_on=1)
    return str(raised.value)


def test_verification_of_other_samples_on_a_rank_raises(ranks: Pool):
    for message in ranks.run(verify_another_batch, PLANS[0]):
        assert "rank(s) [1] passed another batch than rank 0" in message

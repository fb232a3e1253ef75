"""Graphs are profiled, trained, verified and followed: batches that are objects, or no rows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import graphs
import pytest
import ranks as harness
import torch
from ranks import Pool
from records import cluster
from torch import Tensor, nn
from torch.utils.data import DataLoader

import poplar
from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan
from poplar.data import CollateMicroBatches
from poplar.drift.speed_follower import _row
from poplar.profiler.cluster_profiler import Profiler
from poplar.tuning.verification import Verification

GLOBAL_BATCH = 12
PLAN = Plan.manual("2,3,0,1", stage=2, passes=2, shares=(0.5, 0.2, 0.2, 0.1))
CACHED = "from the cache"


def options(**changes: Any) -> dict[str, Any]:
    """The arguments of a small job on the ranks of this call."""
    small = {"max_batch": 4, "seconds": 0.5, "progress": False, "lr": 0.1, "cache": False}
    return {**small, "process_group": harness.group(), **changes}


def tune_and_train() -> list[float]:
    """The losses of three steps with objects as batches."""
    data: Any = graphs.dataset(3 * GLOBAL_BATCH)
    plan = poplar.autotune(
        graphs.Network(),
        graphs.mean_over_graphs,
        CollateMicroBatches(graphs.as_object)(data[:4]),
        **options(global_batch=GLOBAL_BATCH, stage=2, leave_out="never"),
    )
    optimizer = HeteroZeroOptimizer(
        graphs.Network(), torch.optim.SGD, plan=plan, lr=0.1, process_group=harness.group()
    )
    rank = harness.rank()
    loader = DataLoader(
        data,
        batch_sampler=HeteroBatchSampler(len(data), plan, rank=rank),
        collate_fn=CollateMicroBatches(graphs.as_object, plan, rank),
    )
    return [
        float(optimizer.train_step(graphs.mean_over_graphs, batch.to("cpu")).loss)
        for batch in loader
    ]


def train_in_one_process() -> list[float]:
    model, losses = graphs.Network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = graphs.dataset(3 * GLOBAL_BATCH)
    for indices in HeteroBatchSampler(len(data), Plan.manual("12", stage=0), rank=0):
        loss = graphs.mean_over_graphs(model, graphs.as_object([data[index] for index in indices]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_model_that_writes_to_its_batch_is_tuned_and_trains(ranks: Pool) -> None:
    expected = train_in_one_process()
    for losses in ranks.run(tune_and_train, ranks=2):
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def where_from(folder: str, nodes: int, collate: Any) -> tuple[str, list[str]]:
    """Whether the profile was measured, and the warnings about the cache."""
    example = CollateMicroBatches(collate)(graphs.dataset(4, nodes))
    measure = Profiler.measure_devices
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(Profiler, "measure_devices", autospec=True, side_effect=measure) as made,
    ):
        warnings.simplefilter("always")
        poplar.profile_cluster(
            graphs.Network(), graphs.mean_over_graphs, example, **options(cache=folder, stages=(2,))
        )
    told = [str(each.message) for each in caught if "cache" in str(each.message)]
    return "measured" if made.called else CACHED, told


class Unpicklable(graphs.Graphs):
    def __copy__(self) -> Unpicklable:
        return Unpicklable(**vars(self))

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def unpicklable(samples: list[graphs.Graph]) -> graphs.Graphs:
    return Unpicklable(**graphs.as_dict(samples))


def test_larger_graphs_are_profiled_again(ranks: Pool, tmp_path: Path) -> None:
    asked = [(4, graphs.as_object), (4, graphs.as_object), (16, graphs.as_object)]
    answers = [ranks.run(where_from, str(tmp_path), *each, ranks=2)[0] for each in asked]
    assert answers == [("measured", []), (CACHED, []), ("measured", [])]


def test_graphs_of_unknown_size_are_not_cached(ranks: Pool, tmp_path: Path) -> None:
    first, *others = ranks.run(where_from, str(tmp_path), 4, unpicklable, ranks=2)
    assert first[0] == "measured"
    assert "cannot be pickled" in first[1][0]
    assert [told for _, told in others] == [[]]
    assert not list(tmp_path.rglob("*.json"))


def profiled_with_lengths() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        poplar.profile_cluster(
            graphs.Network(),
            graphs.mean_over_graphs,
            CollateMicroBatches(graphs.as_attributes)(graphs.dataset(4)),
            **options(lengths=[1.0, 2.0], stages=(2,)),
        )
    return [str(each.message) for each in caught if "lengths=" in str(each.message)]


def test_lengths_do_not_cut_graphs_and_one_rank_says_so(ranks: Pool) -> None:
    first, *others = ranks.run(profiled_with_lengths, ranks=2)
    assert "only HeteroBatchSampler(lengths=...) uses lengths" in first[0]
    assert others == [[]]


def verified(collate: Any, nodes: int, other_on: int | None = None) -> Verification:
    data = graphs.dataset(GLOBAL_BATCH, nodes, seed=int(harness.rank() == other_on))
    batch = CollateMicroBatches(collate)(data)
    return poplar.verify(graphs.Network(), graphs.mean_over_graphs, batch, PLAN)


def test_plans_for_objects_are_verified(ranks: Pool) -> None:
    for outcome in ranks.run(verified, graphs.as_object, 6):
        assert outcome.ok, str(outcome)
        assert outcome.notes == ()


def verify_another_batch() -> str:
    with pytest.raises(ValueError, match="another batch") as raised:
        verified(graphs.as_object, 6, other_on=1)
    return str(raised.value)


def test_other_objects_on_a_rank_are_noticed(ranks: Pool) -> None:
    for message in ranks.run(verify_another_batch):
        assert "rank(s) [1] passed another batch than rank 0" in message


def test_objects_that_cannot_be_compared_are_noted(ranks: Pool) -> None:
    for outcome in ranks.run(verified, unpicklable, 6):
        assert outcome.ok, str(outcome)
        assert "the batch contains Unpicklable, which cannot be pickled" in outcome.notes[0]


def followed(collate: Any, loss: Any, network: Any) -> list[float]:
    """The lengths of the ranks' samples, as the follower of their speeds sees them."""
    plan = Plan(
        stage=0, global_batch=12, micro_batches=((2, 4), (4,), (2,), ()), shares=(0.25,) * 4
    )
    optimizer = HeteroZeroOptimizer(network(), torch.optim.SGD, plan=plan, lr=0.1)
    optimizer.follow_drift(cluster((250.0,) * 4, ["cpu"] * 4), replan="advise")
    samples = graphs.dataset(max(1, plan.samples(harness.rank())))
    batch = CollateMicroBatches(collate, plan)(samples)
    result = optimizer.train_step(loss, batch)
    return [_row(times).length for times in result.rank_times[:3]]


def rows(samples: list[graphs.Graph]) -> dict[str, Tensor]:
    x, y = zip(*((each.x[0], each.y) for each in samples), strict=True)
    return {"x": torch.stack(x), "y": torch.cat(y)}


def linear() -> nn.Module:
    return nn.Linear(graphs.FEATURES, 1)


def takes_targets(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    targets = batch.pop("y")
    return (model(batch["x"]).squeeze(1) - targets).square().mean()


@pytest.mark.parametrize(
    ("collate", "loss", "network", "length"),
    [
        (graphs.as_object, graphs.mean_over_graphs, graphs.Network, 1.0),
        (rows, takes_targets, linear, graphs.FEATURES + 1.0),
    ],
    ids=["objects", "rows"],
)
def test_ranks_with_unequal_batches_have_equal_lengths(
    ranks: Pool, collate: Any, loss: Any, network: Any, length: float
) -> None:
    """Also if the loss takes something out of its batch, which may run before it is counted."""
    assert ranks.run(followed, collate, loss, network) == [[length] * 3] * 4


class Meter:
    """An object that the loss writes to, for the user."""

    def __init__(self) -> None:
        self.total = 0


def counted_passes(follows: bool) -> int:
    plan = Plan.manual("1,1,1,1", stage=0, passes=2)
    optimizer = HeteroZeroOptimizer(linear(), torch.optim.SGD, plan=plan, lr=0.1)
    if follows:
        optimizer.follow_drift(cluster((250.0,) * 4, ["cpu"] * 4), replan="advise")
    meter = Meter()

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        batch["meter"].total += 1
        return model(batch.pop("x")).square().mean()

    for _ in range(3):
        optimizer.train_step(loss, {"x": torch.ones(2, graphs.FEATURES), "meter": meter})
    return meter.total


@pytest.mark.parametrize("follows", [False, True])
def test_what_a_loss_writes_to_an_object_stays_there(ranks: Pool, follows: bool) -> None:
    assert ranks.run(counted_passes, follows) == [6] * 4

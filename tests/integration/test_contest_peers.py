"""Peers train what everybody trains: the same losses as one process on the whole batch."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from contest import race
from contest import ranks as contest_ranks
from contest.clusters import Cluster
from contest.crew import Crew
from contest.engine import Entrant
from contest.task import Task

from poplar import Plan

STEPS = 5
EACH = 4
"""Samples per rank and step."""
TINY = Task(size="tiny", context=16, learning_rate=1e-2)

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed; `make peers` does that",
)
# One crew, and so one set of processes, per family: ZeRO-3 of DeepSpeed changes torch itself.
FAMILIES = [
    pytest.param((("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)), id="torch"),
    pytest.param(
        (("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2)),
        id="zero-0-to-2",
        marks=needs_deepspeed,
    ),
    pytest.param((("deepspeed", 3),), id="zero-3", marks=needs_deepspeed),
]


def entrant(provider: str, stage: int, ranks: int, passes: int) -> Entrant:
    return Entrant(
        name=f"{provider}, stage {stage}, {ranks} ranks, {passes} passes",
        provider=provider,
        stage=stage,
        policy="even",
        plan=Plan.even(ranks, EACH * ranks, EACH // passes, stage),
        ranks=tuple(range(ranks)),
    )


def one_process(task: Task) -> list[float]:
    """The same training on one device, written plainly."""
    model = task.new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    batches = task.batches(Plan.even(1, task.global_batch, task.global_batch, 0), 0)
    losses = []
    for _ in range(STEPS):
        loss = task.loss_fn(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(crew: Crew, task: Task, one: Entrant) -> tuple[list[float], set[str]]:
    """The global batch's mean loss at each step of a new engine, and what its spans say."""
    crew.call(contest_ranks.build, task, one)
    turns = crew.call(contest_ranks.take_turn, one.name, STEPS)
    spans = crew.call(contest_ranks.trace_step, one.name)
    crew.call(contest_ranks.drop, one.name)
    return race.mean_losses(one, turns), {span.what for span in spans[0]}


@pytest.mark.parametrize(("ranks", "model"), [(2, "llama"), (3, "encoder")])
@pytest.mark.parametrize("peers", FAMILIES)
def test_peers_train_as_one_process_does(peers, ranks, model):
    task = replace(TINY, model=model, global_batch=EACH * ranks)
    expected = one_process(task)
    assert expected[-1] < expected[0]
    entrants = [(entrant(*peer, ranks, passes), passes) for peer in peers for passes in (1, 2)]
    cluster = Cluster(name="equal", cores=(0, 1, 1)[:ranks])
    with cluster.opened() as place, Crew(place, race.family(entrants[0][0])) as crew:
        for one, passes in entrants:
            losses, said = trained(crew, task, one)
            assert losses == pytest.approx(expected, abs=1e-5), one.name
            numbers = range(1, passes + 1)
            backwards = {f"backward of pass {number}" for number in numbers}
            forwards = {f"forward of pass {number}" for number in numbers}
            assert said == backwards | forwards | {"the update"}, one.name

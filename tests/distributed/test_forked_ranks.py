"""A process that was forked from a rank cannot use its optimizer, and leaves the rank as it is."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import nn

from poplar import HeteroZeroOptimizer

CALLS: dict[str, Callable[[HeteroZeroOptimizer], object]] = {
    "train_step": lambda o: o.train_step(loss_of, torch.ones(2, 16)),
    "evaluate": lambda o: o.evaluate(loss_of, [torch.ones(2, 16)]),
    "full_state_dict": lambda o: o.full_state_dict(),
    "full_parameters": lambda o: o.full_parameters().__enter__(),
    "release": lambda o: o.release(),
}


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


def call_in_a_fork(optimizer: HeteroZeroOptimizer) -> dict[str, str]:
    """What each call raises in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = dict.fromkeys(CALLS, "nothing")
        for name, call in CALLS.items():
            try:
                call(optimizer)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        os.write(writer, pickle.dumps(found))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        result: dict[str, str] = pickle.loads(answers.read())
    os.waitpid(child, 0)
    return result


def train_beside_a_fork(transport: str, forks: bool) -> tuple[dict[str, str], list[float]]:
    torch.manual_seed(0)
    optimizer = HeteroZeroOptimizer(
        nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)),
        torch.optim.SGD,
        stage=3,
        lr=0.1,
        process_group=harness.group(),
        communicator=transport,
    )
    optimizer.train_step(loss_of, torch.ones(2, 16))
    raised = call_in_a_fork(optimizer) if forks else {}
    losses = [float(optimizer.train_step(loss_of, torch.ones(2, 16)).loss) for _ in range(2)]
    return raised, losses


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_forked_process_raises_and_the_rank_trains_on(ranks: Pool, transport: str) -> None:
    expected = [losses for _, losses in ranks.run(train_beside_a_fork, transport, False, ranks=2)]
    for rank, (raised, losses) in enumerate(
        ranks.run(train_beside_a_fork, transport, True, ranks=2)
    ):
        assert losses == expected[rank]
        for name, error in raised.items():
            assert error.startswith(f"RuntimeError: rank {rank}: process "), (name, error)
            assert "was forked from the rank's process" in error, (name, error)

"""`poplar.integrations.fsdp2`: stock FSDP2 with unequal passes trains as one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import unequal_passes as training
from ranks import Pool
from unequal_passes import Job, assert_equal_losses

from poplar import Plan

SHARES = (1 / 3,) * 3
PLANS = {
    1: ((3, 3, 2), (2,), (1, 1)),
    2: ((3, 3), (2, 1), (0, 3)),
    3: ((3, 3), (2, 1), (0, 3)),
}
WITHOUT_SAMPLES = {
    1: ((1, 1, 1), (), (4,)),
    2: ((1, 2), (0, 0), (2, 2)),
    3: ((1, 2), (0, 0), (2, 2)),
}
"""Rank 0 has micro-batches without a label, rank 1 has no samples."""


def plan_of(micro_batches: tuple[tuple[int, ...], ...], stage: int) -> Plan:
    samples = sum(map(sum, micro_batches))
    return Plan(stage=stage, global_batch=samples, micro_batches=micro_batches, shares=SHARES)


@pytest.mark.every_combination
@pytest.mark.parametrize(("stage", "model"), [(1, "llama"), (2, "bert"), (3, "gpt2")])
def test_losses_are_those_of_one_process(ranks: Pool, stage: int, model: str) -> None:
    jobs = [Job("tagger", plan_of(WITHOUT_SAMPLES[stage], stage), max_norm=0.1)]
    job = Job("tagger", plan_of(PLANS[stage], stage))
    jobs += [replace(job, model=model, steps=20), replace(job, optimizer="SGD")]
    by_rank = ranks.run(training.train_many, jobs, ranks=3, timeout=200)
    for number, job in enumerate(jobs):
        assert_equal_losses([losses[number] for losses in by_rank], job)

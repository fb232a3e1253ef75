"""`poplar.integrations.ddp`: stock DDP with unequal passes trains as one process does."""

from __future__ import annotations

import unequal_passes as training
from ranks import Pool
from unequal_passes import Job, assert_equal_losses

from poplar import Plan

UNEQUAL = Plan(
    stage=0,
    global_batch=12,
    micro_batches=((3, 3, 2), (2,), (1, 1)),
    shares=(1 / 3,) * 3,
)
ONE_WITHOUT_SAMPLES = Plan(
    stage=0, global_batch=7, micro_batches=((1, 1, 1), (), (4,)), shares=(1 / 3,) * 3
)
"""Rank 0 has micro-batches without a label."""


def test_losses_are_those_of_one_process(ranks: Pool) -> None:
    jobs = [Job(name, UNEQUAL, steps=20) for name in ("llama", "bert", "gpt2")]
    jobs += [
        Job("tagger", ONE_WITHOUT_SAMPLES, steps=5, max_norm=0.1),
        Job("tagger", ONE_WITHOUT_SAMPLES, ddp={"gradient_as_bucket_view": True}),
        Job("tagger", ONE_WITHOUT_SAMPLES, ddp={"find_unused_parameters": True}, optimizer="SGD"),
    ]
    by_rank = ranks.run(training.train_many, jobs, ranks=3, timeout=200)
    for number, job in enumerate(jobs):
        assert_equal_losses([losses[number] for losses in by_rank], job)

"""Who enters: poplar by each of its policies at each stage, its peers, and parts of the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

import poplar
from contest.clusters import Cluster
from contest.crew import Here
from contest.engine import Entrant
from contest.peers import PEERS, UNEVEN_PEERS
from contest.task import Task
from contest.yardstick import LARGEST_BATCH
from poplar import ClusterProfile, Plan

EXAMPLE_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan of ours and how long it should take, said before it runs."""

    policy: str
    plan: Plan
    predicted_seconds: float


def propose(
    here: Here,
    task: Task,
    stages: Sequence[int],
    policies: Sequence[str],
    peaks: Sequence[float],
    seconds: float,
) -> tuple[ClusterProfile, tuple[Proposal, ...]]:
    """Profile the ranks and plan by each policy at each stage. Collective; the same on all ranks.

    Args:
        here: this rank.
        task: what will be trained.
        stages: ZeRO stages.
        policies: of `poplar.search`.
        peaks: floating point operations per second by rank, which policy `flops` goes by.
        seconds: budget of the profile.
    """
    cap = here.place.cluster.cap(here.rank, task.global_batch)
    arguments = {
        "optimizer_class": torch.optim.AdamW,
        "lr": task.learning_rate,
        "max_norm": None,
        "compute_dtype": torch.float32,
        "cache": False,
        "progress": False,
        "max_batch": cap or task.global_batch,
    }
    example = task.example(EXAMPLE_SAMPLES)
    profile = poplar.profile_cluster(
        task.new_model(), task.loss_fn, example, stages=stages, seconds=seconds, **arguments
    )
    devices = zip(profile.devices, peaks, strict=True)
    profile = replace(
        profile, devices=tuple(replace(device, peak_flops=peak) for device, peak in devices)
    )
    proposals = []
    for stage in stages:
        for policy in policies:
            if policy == "exact":  # as a user gets it: the search, and a few steps to be sure
                plan = poplar.autotune(
                    task.new_model(),
                    task.loss_fn,
                    example,
                    global_batch=task.global_batch,
                    stage=stage,
                    profile=profile,
                    seconds=seconds,
                    **arguments,
                )
            else:
                plan = poplar.search(
                    profile, global_batch=task.global_batch, stages=(stage,), policy=policy
                )
            # By the profile alone: autotune's own prediction has seen its trials.
            predicted = poplar.predict(profile, plan).step_seconds
            proposals.append(Proposal(policy, plan, predicted))
    return profile, tuple(proposals)


def ours(proposals: Sequence[Proposal], size: int) -> Iterator[tuple[Entrant, float | None]]:
    """Poplar's entrants with their predictions; the even ones once more, carried as peers are."""
    for proposal in proposals:
        plan = proposal.plan
        entrant = Entrant(
            name=f"poplar {proposal.policy}, stage {plan.stage}",
            provider="poplar",
            stage=plan.stage,
            policy=proposal.policy,
            plan=plan,
            ranks=tuple(range(size)),
        )
        yield entrant, proposal.predicted_seconds
        if proposal.policy == "even":
            name = f"poplar even on gloo, stage {plan.stage}"
            yield replace(entrant, name=name, over_gloo=True), None


def peers(cluster: Cluster, task: Task, stages: Sequence[int]) -> Iterator[Entrant]:
    """What people use today, each in its best legal setting: the same for every rank."""
    micro_batch = even_micro_batch(cluster, task)
    for name, (provider, stage) in PEERS.items():
        if stage in stages:
            yield Entrant(
                name=name,
                provider=provider,
                stage=stage,
                policy="even",
                plan=Plan.even(cluster.size, task.global_batch, micro_batch, stage),
                ranks=tuple(range(cluster.size)),
            )


def uneven_peers(
    cluster: Cluster, task: Task, stages: Sequence[int], speeds: Sequence[float]
) -> Iterator[Entrant]:
    """DDP and FSDP2 with batches in proportion to measured speeds: the baseline that users write."""
    caps = [
        cluster.cap(rank, task.global_batch) or task.global_batch for rank in range(cluster.size)
    ]
    for name, (provider, stage) in UNEVEN_PEERS.items():
        if stage in stages and cluster.unequal:
            yield Entrant(
                name=name,
                provider=provider,
                stage=stage,
                policy="uneven",
                plan=Plan.proportional(speeds, task.global_batch, stage, caps),
                ranks=tuple(range(cluster.size)),
            )


def even_micro_batch(cluster: Cluster, task: Task) -> int:
    """The largest that the smallest rank holds and that cuts every rank's samples evenly.

    Raises:
        ValueError: a global batch that the ranks can't divide evenly, which peers need.
    """
    each, rest = divmod(task.global_batch, cluster.size)
    if rest:
        raise ValueError(
            f"a global batch of {task.global_batch} can't be divided evenly among "
            f"{cluster.size} ranks, as every engine but Poplar needs: give a multiple"
        )
    caps = [cluster.cap(rank, task.global_batch) or each for rank in range(cluster.size)]
    return max(size for size in range(1, each + 1) if each % size == 0 and size <= min(caps))


def parts(cluster: Cluster, task: Task, speeds: Sequence[float]) -> Iterator[Entrant]:
    """Strong ranks only and weak ranks only: is the slow card worth plugging in?

    The better half, by measured speed, is the ranks nearer to the fastest than to the slowest.
    """
    if not cluster.unequal:
        return
    middle = (max(speeds) * min(speeds)) ** 0.5
    strong = tuple(rank for rank, speed in enumerate(speeds) if speed > middle)
    weak = tuple(rank for rank in range(cluster.size) if rank not in strong)
    for name, ranks in (("strong ranks only", strong), ("weak ranks only", weak)):
        each = -(-task.global_batch // len(ranks))
        caps = [cluster.cap(rank, task.global_batch) or each for rank in ranks]
        yield Entrant(
            name=name,
            provider="poplar",
            stage=0,
            policy="even",
            plan=Plan.even(len(ranks), task.global_batch, min(each, LARGEST_BATCH, *caps), 0),
            ranks=ranks,
        )

"""What is compared: Poplar by policy and stage, its peers, and Poplar on a subset of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

import poplar
from head_to_head.calibration import LARGEST_BATCH
from head_to_head.clusters import Cluster
from head_to_head.engine import Configuration
from head_to_head.peers import COMPRESSED, COMPRESSED_PEERS, COMPRESSING, PEERS, UNEVEN_PEERS
from head_to_head.task import Task
from head_to_head.workers import WorkerContext
from poplar import ClusterProfile, Plan
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run.exported_graph import export_loss
from poplar.programmes.run.programme_training import sampling_plan
from poplar.programmes.search.decision import plan_programme
from poplar.values.communication import Communication

EXAMPLE_SAMPLES = 8
UNFACTORED = "unfactored"
"""Policy "exact" without factored layers, where it has chosen some."""
PROGRAMME = "programme"
"""Not a policy of `poplar.search`: tensors are divided, not only the batch."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan of Poplar with its step time, predicted before it runs."""

    policy: str
    plan: Plan
    predicted_seconds: float
    programme: Programme | None = None


def propose(
    context: WorkerContext,
    task: Task,
    stages: Sequence[int],
    policies: Sequence[str],
    peaks: Sequence[float],
    seconds: float,
) -> tuple[ClusterProfile, tuple[Proposal, ...]]:
    """Profile the ranks and plan by each policy at each stage. Collective; the same on all ranks.

    Args:
        context: this rank.
        task: what will be trained.
        stages: ZeRO stages.
        policies: of `poplar.search`; and `PROGRAMME`, to compete with the fastest of the others.
        peaks: floating point operations per second by rank, which policy `flops` uses.
        seconds: budget of the profile.
    """
    cap = context.open_cluster.cluster.cap(context.rank, task.global_batch)
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
    proposals: list[Proposal] = []
    for stage in stages:

        def tuned(factored: str, stage: int = stage) -> Plan:
            """As users call it, trial runs included."""
            return poplar.autotune(
                task.new_model(),
                task.loss_fn,
                example,
                global_batch=task.global_batch,
                stage=stage,
                profile=profile,
                seconds=seconds,
                factored=factored,
                leave_out="never",
                **arguments,
            )

        for policy in policies:
            if policy == PROGRAMME or policy in COMPRESSING:
                continue
            if policy == "exact":
                plans = {policy: tuned("auto")}
                if plans[policy].factored:
                    plans[UNFACTORED] = tuned("never")
                plans |= _compressed(plans.get(UNFACTORED, plans[policy]), policies)
            else:
                found = poplar.search(
                    profile,
                    global_batch=task.global_batch,
                    stages=(stage,),
                    policy=policy,
                    leave_out="never",
                )
                plans = {policy: found}
            # From the profile alone: autotune's prediction has seen its trial runs.
            proposals += [
                Proposal(name, plan, poplar.predict(profile, plan).step_seconds)
                for name, plan in plans.items()
            ]
    if PROGRAMME in policies:
        proposals += _programmes(task, profile, proposals)
    return profile, tuple(proposals)


def _compressed(plan: Plan, policies: Sequence[str]) -> Mapping[str, Plan]:
    """The plan with compressed communication, by policy."""
    return {
        policy: replace(plan, communication=Communication.of(policy, plan.stage), prediction=None)
        for policy in COMPRESSING
        if policy in policies
    }


def _programmes(
    task: Task, profile: ClusterProfile, plans: Sequence[Proposal]
) -> Iterator[Proposal]:
    """The programme that is predicted to be faster than the fastest plan, if there is one."""
    best = min(plans, key=lambda proposal: proposal.predicted_seconds)
    exported = export_loss(task.new_model(), task.loss_fn, task.example(task.global_batch))
    decision = plan_programme(exported.graph, profile, best.plan)
    if decision.programme is not None:
        plan = sampling_plan(decision.programme, task.global_batch)
        yield Proposal(PROGRAMME, plan, decision.step_seconds, decision.programme)


def poplar_configurations(
    proposals: Sequence[Proposal], size: int
) -> Iterator[tuple[Configuration, float | None]]:
    """Poplar's configurations with predictions; even plans once more on gloo, which peers use."""
    for proposal in proposals:
        plan = proposal.plan
        configuration = Configuration(
            name=f"poplar {proposal.policy}, stage {plan.stage}",
            provider="poplar",
            stage=plan.stage,
            policy=proposal.policy,
            plan=plan,
            ranks=tuple(range(size)),
            programme=proposal.programme,
        )
        yield configuration, proposal.predicted_seconds
        if proposal.policy == "even":
            name = f"poplar even on gloo, stage {plan.stage}"
            yield replace(configuration, name=name, over_gloo=True), None


def peers(cluster: Cluster, task: Task, stages: Sequence[int]) -> Iterator[Configuration]:
    """The peers with even batches, as large as every rank can hold."""
    micro_batch = even_micro_batch(cluster, task)
    for name, (provider, stage) in PEERS.items():
        if stage in stages:
            yield Configuration(
                name=name,
                provider=provider,
                stage=stage,
                policy="even",
                plan=Plan.even(cluster.size, task.global_batch, micro_batch, stage),
                ranks=tuple(range(cluster.size)),
            )
    for name, (provider, stage) in COMPRESSED_PEERS.items():
        if stage in stages and cluster.hosts:
            yield Configuration(
                name=name,
                provider=provider,
                stage=stage,
                policy=COMPRESSED,
                plan=Plan.even(cluster.size, task.global_batch, micro_batch, stage),
                ranks=tuple(range(cluster.size)),
            )


def uneven_peers(
    cluster: Cluster, task: Task, stages: Sequence[int], speeds: Sequence[float]
) -> Iterator[Configuration]:
    """DDP and FSDP2 with batches in proportion to measured speeds, set manually."""
    caps = [
        cluster.cap(rank, task.global_batch) or task.global_batch for rank in range(cluster.size)
    ]
    for name, (provider, stage) in UNEVEN_PEERS.items():
        if stage in stages and cluster.unequal:
            yield Configuration(
                name=name,
                provider=provider,
                stage=stage,
                policy="uneven",
                plan=Plan.proportional(speeds, task.global_batch, stage, caps),
                ranks=tuple(range(cluster.size)),
            )


def even_micro_batch(cluster: Cluster, task: Task) -> int:
    """The largest micro-batch that all ranks can hold and that divides a rank's samples evenly.

    Raises:
        ValueError: a global batch that cannot be divided evenly among ranks, as peers need.
    """
    each, rest = divmod(task.global_batch, cluster.size)
    if rest:
        raise ValueError(
            f"a global batch of {task.global_batch} cannot be divided evenly among "
            f"{cluster.size} ranks, as DDP, FSDP2 and DeepSpeed need: use a multiple of it"
        )
    caps = [cluster.cap(rank, task.global_batch) or each for rank in range(cluster.size)]
    return max(size for size in range(1, each + 1) if each % size == 0 and size <= min(caps))


def subset_configurations(
    cluster: Cluster, task: Task, speeds: Sequence[float]
) -> Iterator[Configuration]:
    """Strong ranks only and weak ranks only, which shows what the weak ranks add.

    Strong ranks are those closer in speed to the fastest rank than to the slowest (as a ratio).
    """
    if not cluster.unequal:
        return
    middle = (max(speeds) * min(speeds)) ** 0.5
    strong = tuple(rank for rank, speed in enumerate(speeds) if speed > middle)
    weak = tuple(rank for rank in range(cluster.size) if rank not in strong)
    for name, ranks in (("strong ranks only", strong), ("weak ranks only", weak)):
        each = -(-task.global_batch // len(ranks))
        caps = [cluster.cap(rank, task.global_batch) or each for rank in ranks]
        yield Configuration(
            name=name,
            provider="poplar",
            stage=0,
            policy="even",
            plan=Plan.even(len(ranks), task.global_batch, min(each, LARGEST_BATCH, *caps), 0),
            ranks=ranks,
        )

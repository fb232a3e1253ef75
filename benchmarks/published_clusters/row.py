"""The rows of one case: every policy, simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import provenance

from published_clusters.costs import Costs
from published_clusters.policies import POLICIES, RECONSTRUCTED, Case, Chosen
from published_clusters.published import Evaluation
from published_clusters.simulation import simulate

BASELINE = "DP-EV"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One policy on one case. Ranges are over the outlooks of the cluster."""

    simulated: bool
    cluster: str
    """A name of `published.EVALUATIONS`."""
    hosts: str
    model: str
    ranks: int
    global_batch: int
    policy: str
    reconstructed: bool
    """Whether the policy is our reconstruction of another system."""
    samples_per_second: float | None
    samples_per_second_low: float | None
    samples_per_second_high: float | None
    over_even: float | None
    """Over DP-EV, on the same outlooks."""
    over_even_low: float | None
    over_even_high: float | None
    published: str
    """What the authors of this policy published for this cluster; empty for other policies."""
    published_source: str
    settings: str
    """Where the cluster and the batch are described."""
    details: str
    why_not: str
    """Why there is no figure; else empty."""
    day: str
    commit: str


def rows_of(name: str, evaluation: Evaluation, model: str) -> Iterator[Row]:
    """The rows of every policy for a model."""
    cluster = evaluation.cluster
    case = Case(
        model=model,
        layers=evaluation.models[model](cluster.world_size),
        global_batch=evaluation.batch_per_rank[model] * cluster.world_size,
    )
    baseline: list[float] = []
    for policy, decide in POLICIES.items():
        chosen = decide(Costs(cluster), case)
        rates = _rates(evaluation, case, chosen)
        if policy == BASELINE:
            baseline = rates
        gains = [own / other for own, other in zip(rates, baseline, strict=False)]
        is_own = policy == evaluation.system
        yield Row(
            simulated=True,
            cluster=name,
            hosts=cluster.name,
            model=model,
            ranks=cluster.world_size,
            global_batch=case.global_batch,
            policy=policy,
            reconstructed=policy in RECONSTRUCTED,
            samples_per_second=rates[0] if rates else None,
            samples_per_second_low=min(rates, default=None),
            samples_per_second_high=max(rates, default=None),
            over_even=gains[0] if gains else None,
            over_even_low=min(gains, default=None),
            over_even_high=max(gains, default=None),
            published=evaluation.figure if is_own else "",
            published_source=evaluation.source if is_own else "",
            settings=evaluation.settings,
            details=chosen.details,
            why_not=chosen.why_not,
            day=time.strftime("%Y-%m-%d", time.gmtime()),
            commit=provenance.commit(),
        )


def _rates(evaluation: Evaluation, case: Case, chosen: Chosen) -> list[float]:
    """Samples per second on every outlook, the middle first; none if there is no step."""
    if chosen.step is None:
        return []
    return [
        case.global_batch / simulate(outlook, chosen.step(Costs(outlook)))
        for outlook in evaluation.cluster.outlooks()
    ]

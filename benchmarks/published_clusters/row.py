"""The rows of one case: every policy, simulated."""

from __future__ import annotations

from collections.abc import Iterator

from rows import Row

from published_clusters.costs import Costs
from published_clusters.policies import POLICIES, RECONSTRUCTED, Case, Chosen
from published_clusters.published import Evaluation
from published_clusters.simulation import simulate

BASELINE = "DP-EV"


def rows_of(name: str, evaluation: Evaluation, model: str) -> Iterator[Row]:
    """The rows of every policy for a model.

    Ranges (`low`, `high`) are over the outlooks of the cluster. Gains are over DP-EV on the same
    outlooks. `why_not` says why there is no figure, `settings` where cluster and batch are from.
    """
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
        what = {
            "cluster": name,
            "hosts": cluster.name,
            "model": model,
            "ranks": cluster.world_size,
            "global_batch": case.global_batch,
            "policy": policy,
            "reconstructed": policy in RECONSTRUCTED,
            "settings": evaluation.settings,
        }
        figures = {
            "samples_per_second": rates[0] if rates else None,
            "samples_per_second_low": min(rates, default=None),
            "samples_per_second_high": max(rates, default=None),
            "over_even": gains[0] if gains else None,
            "over_even_low": min(gains, default=None),
            "over_even_high": max(gains, default=None),
            "published": evaluation.figure if is_own else "",
            "published_source": evaluation.source if is_own else "",
            "details": chosen.details,
            "why_not": chosen.why_not,
        }
        yield Row.of("per_tensor", what, figures, packages=())


def _rates(evaluation: Evaluation, case: Case, chosen: Chosen) -> list[float]:
    """Samples per second on every outlook, the middle first; none if there is no step."""
    if chosen.step is None:
        return []
    return [
        case.global_batch / simulate(outlook, chosen.step(Costs(outlook)))
        for outlook in evaluation.cluster.outlooks()
    ]

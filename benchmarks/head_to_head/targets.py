"""Thresholds of the results, and whether rows meet them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from verdict import Verdict

from head_to_head.peers import PEERS
from head_to_head.row import Row, comparisons_of

BALANCE_OF_IDEAL = 0.95
OF_SUM = {0: 0.95, 1: 0.95, 2: 0.95, 3: 0.90}
OF_SUM_CLUSTERS = ("2:1:1", "3:1:1:1", "2:1", "4:1", "4:2:1")
OF_SUM_AT_8_TO_1 = {3: 0.85}
OF_SUM_SAMPLES = 32
"""Least samples per rank and step for a threshold on the fraction of the sum of speeds."""
OVER_DEEPSPEED = {"2:1:1": {0: 1.15, 1: 1.4, 2: 1.4, 3: 1.4}, "8:1": dict.fromkeys(range(4), 3.9)}
OVER_BEST_PEER = 1.12
EQUAL_RANKS = 0.97
PEAK_MEMORY = 1.0
LOSS = 1e-4
STEPS = 50
"""Least steps of each configuration for a conclusive verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterVerdict(Verdict):
    """One result and its threshold."""

    cluster: str
    stage: int | None
    """None: all stages."""
    is_preliminary: bool = False
    """Measured with fewer than `STEPS` steps."""

    @property
    def shown(self) -> str:
        """The result as text, with enough digits to distinguish it from its threshold."""
        return "not measured" if self.value is None else f"{self.value:.5g}"

    @property
    def mark(self) -> str:
        """Met or short, in brackets after too few steps."""
        mark = "✓" if self.met else "short"
        return f"({mark})" if self.is_preliminary else mark

    def __str__(self) -> str:
        return f"{self.shown} ({self.condition}{'' if self.met else ', short'})"


def verdicts(rows: Sequence[Row]) -> Iterator[ClusterVerdict]:
    """Every result that has a threshold, in the order of the rows.

    A result that is missing because an engine is missing or failed is a verdict, too.
    """
    for name, own in comparisons_of(rows).items():
        is_preliminary = any(row.steps < STEPS for row in own if not row.absent)
        for verdict in _verdicts_of(name, own):
            yield replace(verdict, is_preliminary=is_preliminary)


def _verdicts_of(name: str, own: Sequence[Row]) -> Iterator[ClusterVerdict]:
    for row in own:
        if row.is_plan and row.policy == "exact":
            yield from _of_plan(name, row, own)
        if row.is_plan and row.policy in ("even", "exact") and not row.unequal:
            yield from _of_equal_ranks(name, row, own)
    differences = [row.loss_difference for row in own if row.loss_difference is not None]
    if differences:
        yield ClusterVerdict(
            cluster=name,
            stage=None,
            what="largest loss difference",
            value=max(differences),
            wanted=LOSS,
            at_most=True,
        )


def _of_plan(name: str, row: Row, own: Sequence[Row]) -> Iterator[ClusterVerdict]:
    def verdict(what: str, value: float | None, wanted: float | None) -> Iterator[ClusterVerdict]:
        if wanted is not None:
            yield ClusterVerdict(
                cluster=name, stage=row.stage, what=what, value=value, wanted=wanted
            )

    of_sum = OF_SUM if row.cluster in OF_SUM_CLUSTERS else {}
    of_sum = OF_SUM_AT_8_TO_1 if row.cluster == "8:1" else of_sum
    if row.global_batch < OF_SUM_SAMPLES * len(row.ranks):
        of_sum = {}
    yield from verdict("of the sum of speeds", row.of_sum_of_speeds, of_sum.get(row.stage))
    if not row.unequal:
        return
    yield from verdict("balance over its ideal", row.balance_of_ideal, BALANCE_OF_IDEAL)
    deepspeed = [row.over.get(peer.configuration) for peer in own if _is_deepspeed(peer, row.stage)]
    wanted = OVER_DEEPSPEED.get(row.cluster, {}).get(row.stage)
    yield from verdict("over DeepSpeed", deepspeed[0] if deepspeed else None, wanted)
    if row is _fastest(own):
        all_peers = {peer for peer in PEERS if peer in row.over} == {*PEERS}
        over_best = min(row.over.values()) if all_peers else None
        yield from verdict("fastest plan over the best peer", over_best, OVER_BEST_PEER)


def _of_equal_ranks(name: str, row: Row, own: Sequence[Row]) -> Iterator[ClusterVerdict]:
    expected = {peer for peer, (_, stage) in PEERS.items() if stage == row.stage}
    over = row.over_best_peer_of_stage if expected <= row.over.keys() else None
    yield ClusterVerdict(
        cluster=name,
        stage=row.stage,
        what=f"{row.policy} over {row.best_peer_of_stage or 'the best peer'}",
        value=over[0] if over else None,
        wanted=EQUAL_RANKS,
    )
    if row.policy != "even":  # its passes differ, and so does its memory
        return
    peers = [r for r in own if r.is_peer and r.stage == row.stage and r.peak_memory]
    measured = expected == {peer.configuration for peer in peers}
    least = min(max(peer.peak_memory) for peer in peers) if measured else None
    yield ClusterVerdict(
        cluster=name,
        stage=row.stage,
        what="peak memory over the peers' least",
        value=max(row.peak_memory) / least if row.peak_memory and least else None,
        wanted=PEAK_MEMORY,
        at_most=True,
    )


def _is_deepspeed(row: Row, stage: int) -> bool:
    return row.provider == "deepspeed" and row.stage == stage


def _fastest(own: Sequence[Row]) -> Row:
    """The fastest of Poplar's exact plans; the first one if none has a result."""
    plans = [row for row in own if row.is_plan and row.policy == "exact"]
    return max(plans, key=lambda row: row.p50_speed or 0.0)

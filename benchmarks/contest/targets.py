"""What the figures have to show, and whether they do. Thresholds in one place, judged by rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from contest.row import Row

BALANCE_OF_IDEAL = 0.95
OF_SUM = {0: 0.95, 1: 0.95, 2: 0.95, 3: 0.90}
OF_SUM_CLUSTERS = ("2:1:1", "3:1:1:1", "2:1", "4:1", "4:2:1")
OF_SUM_AT_8_TO_1 = {3: 0.85}
OVER_DEEPSPEED = {"2:1:1": {0: 1.15, 1: 1.4, 2: 1.4, 3: 1.4}, "8:1": dict.fromkeys(range(4), 3.9)}
OVER_BEST_PEER = 1.12
EQUAL_RANKS = 0.97
LOSS = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One figure beside what it has to be."""

    cluster: str
    stage: int | None
    """None: of all stages."""
    what: str
    value: float
    wanted: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Rounded as it is printed."""
        value = round(self.value, 6 if self.at_most else 3)
        return value <= self.wanted if self.at_most else value >= self.wanted

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{self.value:.3g} ({sign} {self.wanted:g}{'' if self.met else ', short'})"


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Every figure that has a threshold, in the order of the rows."""
    for cluster in dict.fromkeys(row.cluster for row in rows):
        own = [row for row in rows if row.cluster == cluster and not row.absent]
        planned = [r for r in own if r.provider == "poplar" and r.takes_all_ranks]
        for row in planned:
            if row.policy == "exact":
                yield from _of_plan(row, own)
            if row.policy == "even" and row.balance is not None and not row.unequal:
                yield from _of_equal_ranks(row, own)
        differences = [row.loss_difference for row in own if row.loss_difference is not None]
        if differences:
            yield Verdict(
                cluster=cluster,
                stage=None,
                what="largest loss difference",
                value=max(differences),
                wanted=LOSS,
                at_most=True,
            )


def _of_plan(row: Row, own: Sequence[Row]) -> Iterator[Verdict]:
    def verdict(what: str, value: float | None, wanted: float | None) -> Iterator[Verdict]:
        if value is not None and wanted is not None:
            yield Verdict(
                cluster=row.cluster, stage=row.stage, what=what, value=value, wanted=wanted
            )

    of_sum = OF_SUM if row.cluster in OF_SUM_CLUSTERS else {}
    of_sum = OF_SUM_AT_8_TO_1 if row.cluster == "8:1" else of_sum
    yield from verdict("of the sum of speeds", row.of_sum_of_speeds, of_sum.get(row.stage))
    if not row.unequal:
        return
    yield from verdict("balance over its ideal", row.balance_of_ideal, BALANCE_OF_IDEAL)
    deepspeed = [value for name, value in row.over.items() if name.endswith(f"ZeRO-{row.stage}")]
    wanted = OVER_DEEPSPEED.get(row.cluster, {}).get(row.stage)
    yield from verdict("over DeepSpeed", deepspeed[0] if deepspeed else None, wanted)
    fastest = _fastest(own)
    if row.entrant == fastest.entrant and row.over:
        yield from verdict(
            "fastest plan over the best peer", min(row.over.values()), OVER_BEST_PEER
        )


def _of_equal_ranks(row: Row, own: Sequence[Row]) -> Iterator[Verdict]:
    if row.over_best_peer_of_stage is not None:
        yield Verdict(
            cluster=row.cluster,
            stage=row.stage,
            what=f"even over {row.best_peer_of_stage}",
            value=row.over_best_peer_of_stage[0],
            wanted=EQUAL_RANKS,
        )
    peers = [r for r in own if r.is_peer and r.stage == row.stage and r.peak_memory]
    if peers and row.peak_memory:
        yield Verdict(
            cluster=row.cluster,
            stage=row.stage,
            what="peak memory over the peers' least",
            value=max(row.peak_memory) / min(max(peer.peak_memory) for peer in peers),
            wanted=1.0,
            at_most=True,
        )


def _fastest(own: Sequence[Row]) -> Row:
    plans = [r for r in own if r.provider == "poplar" and r.policy == "exact" and r.takes_all_ranks]
    return max(plans, key=lambda row: row.p50_speed or 0.0)

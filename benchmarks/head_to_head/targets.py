"""Thresholds of the results, and whether rows meet them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rows import Row, Target

from head_to_head.peers import COMPRESSED, COMPRESSING, PEERS
from head_to_head.row import comparisons_of, is_peer, is_plan

BALANCE_OF_IDEAL = 0.95
OF_SUM = {0: 0.95, 1: 0.95, 2: 0.95, 3: 0.90}
OF_SUM_CLUSTERS = ("2:1:1", "3:1:1:1", "2:1", "4:1", "4:2:1")
OF_SUM_AT_8_TO_1 = {3: 0.85}
OF_SUM_SAMPLES = 32
"""Least samples per rank and step for a threshold on the fraction of the sum of speeds."""
OVER_DEEPSPEED = {"2:1:1": {0: 1.15, 1: 1.4, 2: 1.4, 3: 1.4}, "8:1": dict.fromkeys(range(4), 3.9)}
OVER_BEST_PEER = 1.12
OVER_EXACT = 2.0
"""Where links are slow."""
EQUAL_RANKS = 0.97
PEAK_MEMORY = 1.0
LOSS = 1e-4
STEPS = 50
"""Least steps of each configuration for a conclusive verdict."""


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Every result that has a threshold, in the order of the rows.

    A result that is missing because an engine is missing or failed has a target, too. After few
    steps the case says how many there were.
    """
    for name, own in comparisons_of(rows).items():
        fewest = min((row["steps"] for row in own if not row["absent"]), default=0)
        few = f" ({fewest} steps only)" if fewest < STEPS else ""
        for row in own:
            case = f"{name}, stage {row['stage']}{few}"
            if is_plan(row, "exact"):
                yield from _of_plan(case, row, own)
            if is_plan(row, "even", "exact") and not row["unequal"]:
                yield from _of_equal_ranks(case, row, own)
        yield from _of_compression(f"{name}{few}", own)
        differences = [
            row["loss_difference"]
            for row in own
            if row["policy"] != COMPRESSED and not is_plan(row, *COMPRESSING)
        ]
        known = [difference for difference in differences if difference is not None]
        if known:
            yield Target(
                case=f"{name}, all stages{few}",
                what="largest loss difference",
                value=max(known),
                wanted=LOSS,
                at_most=True,
            )


def _of_plan(case: str, row: Row, own: Sequence[Row]) -> Iterator[Target]:
    def target(what: str, value: float | None, wanted: float | None) -> Iterator[Target]:
        if wanted is not None:
            yield Target(case=case, what=what, value=value, wanted=wanted)

    cluster, stage = row["cluster"], row["stage"]
    of_sum = OF_SUM if cluster in OF_SUM_CLUSTERS else {}
    of_sum = OF_SUM_AT_8_TO_1 if cluster == "8:1" else of_sum
    if row["global_batch"] < OF_SUM_SAMPLES * len(row["ranks"]):
        of_sum = {}
    yield from target("of the sum of speeds", row["of_sum_of_speeds"], of_sum.get(stage))
    if not row["unequal"]:
        return
    yield from target("balance over its ideal", row["balance_of_ideal"], BALANCE_OF_IDEAL)
    deepspeed = [
        row["over"].get(peer["configuration"])
        for peer in own
        if (peer["provider"], peer["stage"]) == ("deepspeed", stage)
    ]
    wanted = OVER_DEEPSPEED.get(cluster, {}).get(stage)
    yield from target("over DeepSpeed", deepspeed[0] if deepspeed else None, wanted)
    if row is _fastest(own):
        all_peers = PEERS.keys() <= row["over"].keys()
        over_best = min(row["over"][peer] for peer in PEERS) if all_peers else None
        yield from target("fastest plan over the best peer", over_best, OVER_BEST_PEER)


def _of_compression(case: str, own: Sequence[Row]) -> Iterator[Target]:
    """The fastest plan with compressed communication over the fastest exact one."""
    compressed = [row["p50_speed"] for row in own if is_plan(row, *COMPRESSING)]
    if compressed:
        speeds = [row["p50_speed"] or 0.0 for row in own if is_plan(row, "even", "exact")]
        fastest = max((speed or 0.0 for speed in compressed), default=0.0)
        value = fastest / max(speeds) if any(speeds) else None
        what = "compressed over the fastest exact plan"
        yield Target(case=case, what=what, value=value, wanted=OVER_EXACT)


def _of_equal_ranks(case: str, row: Row, own: Sequence[Row]) -> Iterator[Target]:
    expected = {peer for peer, (_, stage) in PEERS.items() if stage == row["stage"]}
    over = row["over_best_peer_of_stage"] if expected <= row["over"].keys() else None
    yield Target(
        case=case,
        what=f"{row['policy']} over {row['best_peer_of_stage'] or 'the best peer'}",
        value=over[0] if over else None,
        wanted=EQUAL_RANKS,
    )
    if row["policy"] != "even":  # its passes differ, and so does its memory
        return
    peers = [r for r in own if is_peer(r) and r["stage"] == row["stage"] and r["peak_memory"]]
    measured = expected == {peer["configuration"] for peer in peers}
    least = min(max(peer["peak_memory"]) for peer in peers) if measured else None
    yield Target(
        case=case,
        what="peak memory over the peers' least",
        value=max(row["peak_memory"]) / least if row["peak_memory"] and least else None,
        wanted=PEAK_MEMORY,
        at_most=True,
    )


def _fastest(own: Sequence[Row]) -> Row:
    """The fastest of Poplar's exact plans; the first one if none has a result."""
    return max(
        (row for row in own if is_plan(row, "exact")), key=lambda row: row["p50_speed"] or 0.0
    )

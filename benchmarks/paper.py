"""The evaluation of the Poplar paper (arXiv 2408.12596), simulated.

Three clusters of two device types, models of the Llama and BERT families, a global batch of two
million tokens, every ZeRO stage. Each policy plans on estimated profiles (`poplar.hardware`), and
the cost model predicts the plan. Nothing is measured: every line says "simulated".

    python benchmarks/paper.py --output rows.jsonl
    python benchmarks/paper.py --quick

Policies:

- `weak` and `strong`: only one of the two device types, evenly;
- `even`: equal work, the largest micro-batch that fits the smallest device (DeepSpeed);
- `flops`: in proportion to peak FLOP/s (Whale);
- `paper`: *our reconstruction* of the published policy, without its full text and code;
- `exact`: ours.

All policies use the same simulated engine and links, so results show only the effect of balance.
The paper's links, device counts and sample lengths are not known to us: links are varied
(`--links`), counts are taken literally, samples have the models' default lengths, and the 0.5B
shape is ours. The A800 has the peak of an A100 and slower links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import roofline_errors
from rows import Column, Kind, Row, new_parser, report

from poplar.hardware.cluster_file import ClusterFile
from poplar.hardware.estimate import estimate, gain
from poplar.hardware.model_shapes import TrainingJob, architecture
from poplar.hardware.simulated_cluster import SimulatedCluster, simulated_cluster
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.search import search
from poplar.values.plan import Plan

TOKENS = 2 * 2**20
"""Per global batch."""
CLUSTERS = {
    "A": ("A100-SXM-80", "A100-SXM-40"),
    "B": ("V100-SXM2-16", "T4"),
    "C": ("A800-80", "V100S-PCIe-32"),
}
"""Strong and weak device."""
COUNTS = ((1, 1), (1, 3), (3, 1), (4, 1))
"""Numbers of strong and weak devices."""
MODELS = ("llama-0.5b", "llama-1.1b", "bert-large")
STAGES = (0, 1, 2, 3)
LINKS = {
    "pcie": {"link_gb_per_s": 16.0},
    "100g": {"network_gbit_per_s": 100.0},
    "10g": {"network_gbit_per_s": 10.0},
}
"""All devices in one host on PCIe 3, or one host per device type with this network between."""
POLICIES = ("even", "flops", "paper", "exact")
PUBLISHED = (1.02, 3.92)
"""Smallest and largest speed-up over baselines that the paper reports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One cluster, one model, one stage."""

    cluster: str
    strong: str
    weak: str
    strong_count: int
    weak_count: int
    links: str
    model: str
    stage: int

    @property
    def job(self) -> TrainingJob:
        """The training job."""
        return TrainingJob(architecture=architecture(self.model))

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return TOKENS // self.job.sequence

    def simulated(self, *, strong: bool = True, weak: bool = True) -> SimulatedCluster:
        """The cluster, or only one device type."""
        types = [(self.strong, self.strong_count)] * strong + [(self.weak, self.weak_count)] * weak
        devices = [{"gpu": gpu, "count": count} for gpu, count in types]
        content: dict[str, Any] = {"name": f"{self.cluster} {self.strong_count}:{self.weak_count}"}
        if self.links == "pcie":
            content["host"] = [{"device": devices, **LINKS[self.links]}]
        else:
            content["host"] = [{"name": device["gpu"], "device": [device]} for device in devices]
            content.update(LINKS[self.links])
        return simulated_cluster(ClusterFile.from_dict(content), self.job)


def cases(
    clusters: Sequence[str],
    models: Sequence[str],
    stages: Sequence[int],
    links: Sequence[str],
    counts: Sequence[tuple[int, int]],
) -> Iterator[Case]:
    """The product of the options."""
    for between, name, (strong_count, weak_count), model, stage in product(
        links, clusters, counts, models, stages
    ):
        strong, weak = CLUSTERS[name]
        yield Case(
            cluster=name,
            strong=strong,
            weak=weak,
            strong_count=strong_count,
            weak_count=weak_count,
            links=between,
            model=model,
            stage=stage,
        )


def rows_of(case: Case) -> Iterator[Row]:
    """The rows of every policy on one case."""
    whole = case.simulated()
    found = {policy: _plan(whole, case, policy) for policy in POLICIES}
    for policy, selection in (("weak", {"strong": False}), ("strong", {"weak": False})):
        alone = case.simulated(**selection)
        yield _row(case, policy, alone, _plan(alone, case, "even"), {})
    for policy, plan in found.items():
        yield _row(case, policy, whole, plan, found)


def _plan(simulated: SimulatedCluster, case: Case, policy: str) -> Plan | str:
    try:
        return search(
            simulated.middle,
            global_batch=case.global_batch,
            stages=[case.stage],
            policy=policy,
            leave_out="never",
        )
    except NoPlanFits as error:
        return str(error)


def _row(
    case: Case,
    policy: str,
    simulated: SimulatedCluster,
    plan: Plan | str,
    others: dict[str, Plan | str],
) -> Row:
    fits = isinstance(plan, Plan)
    worth = estimate(simulated, plan) if fits else None
    gains = {
        name: gain(simulated, plan, other)
        for name, other in others.items()
        if fits and isinstance(other, Plan)
    }
    best = {"even": gains.get("even"), "flops": gains.get("flops")}
    figures: dict[str, Any] = {"tflops": None, "tflops_low": None, "tflops_high": None}
    if worth:
        low, middle, high = worth.tflops.low, worth.tflops.middle, worth.tflops.high
        figures = {"tflops": middle, "tflops_low": low, "tflops_high": high}
    for name, one in best.items():
        figures |= {
            f"over_{name}": one.middle if one else None,
            f"over_{name}_low": one.low if one else None,
            f"over_{name}_high": one.high if one else None,
        }
    figures |= {
        "of_sum_of_speeds": worth.of_sum_of_speeds.middle if worth else None,
        # The largest number of passes of a rank.
        "passes": max(map(len, plan.micro_batches)) if fits else None,
        # Why no plan fits; else empty.
        "why_not": "" if fits else plan,
    }
    what = {**asdict(case), "sequence": case.job.sequence, "global_batch": case.global_batch}
    return Row.of("paper", {**what, "policy": policy}, figures, packages=())


def _range(name: str, row: Row) -> tuple[float, float, float] | None:
    if row[name] is None:
        return None
    return row[name], row[f"{name}_low"], row[f"{name}_high"]


COLUMNS = (
    Column("cluster", lambda row: _name(row)),
    Column("policy", "policy"),
    Column("TFLOP/s", partial(_range, "tflops"), "{:.0f} ({:.0f} to {:.0f})"),
    Column("of sum of speeds", "of_sum_of_speeds", "{:.0%}"),
    Column("over even", partial(_range, "over_even"), "{:.2f} ({:.2f} to {:.2f})"),
    Column("over flops", "over_flops", "{:.2f}"),
    Column("passes", "passes"),
)


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Summary lines of the rows, with their limits."""
    yield "simulated: no device of these clusters was measured."
    errors = sorted(roofline_errors.errors(), key=lambda one: abs(one.error))
    yield (
        f"Calibration: the error on its {len(errors)} published measurements is "
        f"{100 * abs(errors[len(errors) // 2].error):.0f} % (median) and "
        f"{100 * abs(errors[-1].error):.0f} % (worst). The T4 has no measurement."
    )
    held_out = [one.error for one in roofline_errors.held_out_errors()]
    yield (
        f"Held out: the error on {len(held_out)} results of BERT-large with software of 2020 is "
        f"{100 * min(held_out):+.0f} % to {100 * max(held_out):+.0f} % (above 0: too fast). "
        "Speed-ups depend on the ratios between devices, and these depend on software."
    )
    for policy, label in (
        ("paper", "our reconstruction of the published policy"),
        ("exact", "our exact policy"),
    ):
        yield _span(rows, policy, label)
    ours = _by_case(rows, "exact")
    ratios = [ours[key] / theirs for key, theirs in _by_case(rows, "paper").items() if key in ours]
    if ratios:
        yield (
            f"simulated: exact over our reconstruction of the published policy: {min(ratios):.2f} "
            f"to {max(ratios):.2f}x. This does not measure the authors' code."
        )
    yield from _over_one_kind(rows)


def _span(rows: Sequence[Row], policy: str, label: str) -> str:
    known = [row for row in rows if row["policy"] == policy and row["over_even"] is not None]
    if not known:
        return f"simulated: {label} has no case in which it and even both fit."
    least = min(known, key=lambda row: row["over_even"])
    most = max(known, key=lambda row: row["over_even"])
    return (
        f"simulated: {label} over even: {least['over_even']:.2f}x ({_name(least)}) to "
        f"{most['over_even']:.2f}x ({_name(most)}); published {PUBLISHED[0]} to {PUBLISHED[1]}x "
        "over its baselines."
    )


def _over_one_kind(rows: Sequence[Row]) -> Iterator[str]:
    ours = _by_case(rows, "paper")
    for kind in ("weak", "strong"):
        alone = _by_case(rows, kind)
        ratios = [ours[key] / alone[key] for key in ours if key in alone]
        if ratios:
            yield (
                f"simulated: our reconstruction over the {kind} devices alone: {min(ratios):.2f} "
                f"to {max(ratios):.2f}x. The published range covers all baselines."
            )
    mixed, strong = _by_case(rows, "exact"), _by_case(rows, "strong")
    for links in dict.fromkeys(row["links"] for row in rows):
        places = [key for key in mixed if key in strong and key[0] == links]
        lost = [key for key in places if strong[key] > mixed[key]]
        yield (
            f"simulated: links {links}: in {len(lost)} of {len(places)} cases the strong devices "
            "alone are faster than any plan for both device types at the same stage."
        )


def _key(row: Row) -> tuple[Any, ...]:
    names = ("links", "cluster", "strong_count", "weak_count", "model", "stage")
    return tuple(row[name] for name in names)


def _by_case(rows: Sequence[Row], policy: str) -> dict[tuple[Any, ...], float]:
    """TFLOP/s of one policy by case."""
    return {
        _key(row): row["tflops"]
        for row in rows
        if row["policy"] == policy and row["tflops"] is not None
    }


def _name(row: Row) -> str:
    return (
        f"{row['strong_count']} {row['strong']} + {row['weak_count']} {row['weak']}, "
        f"{row['model']}, stage {row['stage']}, {row['links']}"
    )


def main() -> None:
    """Run all cases and print the table and the findings."""
    parser = new_parser(__doc__, quick="one device count and one type of links")
    for name, choices in (
        ("clusters", list(CLUSTERS)),
        ("models", MODELS),
        ("stages", STAGES),
        ("links", list(LINKS)),
    ):
        kind = type(choices[0])
        parser.add_argument(
            f"--{name}", nargs="+", type=kind, choices=choices, default=choices, help=name
        )
    arguments = parser.parse_args()
    links, counts = arguments.links, COUNTS
    if arguments.quick:
        links, counts = links[:1], COUNTS[:1]
    wanted = cases(arguments.clusters, arguments.models, arguments.stages, links, counts)
    measured = (row for case in wanted for row in rows_of(case))
    rows = report(arguments, measured, Kind("paper", COLUMNS, title="simulated"))
    print("\n".join(findings(rows)))


if __name__ == "__main__":
    main()

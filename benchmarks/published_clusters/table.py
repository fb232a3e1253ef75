"""What the command prints: a table per cluster, and findings with their limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from poplar.hardware.device_catalog import UNCALIBRATED_SPREAD
from published_clusters.costs import Costs, seconds_of
from published_clusters.published import (
    EVALUATIONS,
    LEFT_OUT,
    PROFILED_COLLECTIVES,
    PROFILED_P100,
    PROFILED_V100,
)
from published_clusters.row import BASELINE, Row

_PROBE_BYTES = 64e6


def table(rows: Sequence[Row]) -> Table:
    """The rows of one cluster."""
    first = rows[0]
    shown = Table(title=f"simulated: {first.cluster}: {first.hosts}", show_header=True)
    for name in ("model", "policy", "samples/s, simulated", "over DP-EV", "published", "decisions"):
        shown.add_column(name)
    for row in rows:
        shown.add_row(
            row.model if row.policy == BASELINE else "",
            label(row),
            _interval(
                row.samples_per_second, row.samples_per_second_low, row.samples_per_second_high, 0
            ),
            _interval(row.over_even, row.over_even_low, row.over_even_high, 2),
            row.published,
            row.why_not or row.details,
            end_section=row.policy == rows[-1].policy,
        )
    return shown


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """One line per cluster and model: gains over DP-EV, with the published figure."""
    policies = [name for name in dict.fromkeys(row.policy for row in rows) if name != BASELINE]
    labels = {row.policy: label(row) for row in rows}
    titles = ["cluster", "model", "DP-EV, samples/s", *(labels[name] for name in policies)]
    yield "| " + " | ".join([*titles, "published"]) + " |"
    yield "| --- " * (len(titles) + 1) + "|"
    for case in dict.fromkeys((row.cluster, row.model) for row in rows):
        own = {row.policy: row for row in rows if (row.cluster, row.model) == case}
        published = [f"{row.policy}: {row.published}" for row in own.values() if row.published]
        cells = [_cell(own[name], own[BASELINE]) for name in policies]
        even = own[BASELINE]
        first = _interval(
            even.samples_per_second, even.samples_per_second_low, even.samples_per_second_high, 0
        )
        yield "| " + " | ".join([*case, first or "does not fit", *cells, *published]) + " |"


def _cell(row: Row, even: Row) -> str:
    """The gain, or samples per second where DP-EV does not fit."""
    if row.samples_per_second is None:
        return "does not end" if "states" in row.why_not else "does not fit"
    if even.samples_per_second is None:
        return f"{row.samples_per_second:.0f} samples/s"
    return _interval(row.over_even, row.over_even_low, row.over_even_high, 2)


def label(row: Row) -> str:
    """The policy, with whose it is."""
    return f"{row.policy}, our reconstruction, simulated" if row.reconstructed else row.policy


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Summary lines of the rows, with their limits."""
    yield (
        "simulated: no device or link of these clusters was measured by us. Ranges are over all "
        f"devices {100 * UNCALIBRATED_SPREAD:.0f} % faster or slower and links 30 %, and over one "
        "type of device slower than the others."
    )
    for name in dict.fromkeys(row.cluster for row in rows):
        yield from _largest_gain([row for row in rows if row.cluster == name])
    yield from _reasons(rows)
    yield from _checks(dict.fromkeys(row.cluster for row in rows))
    yield f"Left out: {LEFT_OUT}."


def _largest_gain(rows: Sequence[Row]) -> Iterator[str]:
    own = [row for row in rows if row.published]
    known = [row for row in own if row.over_even is not None]
    if not known:
        return
    most = max(known, key=lambda row: row.over_even or 0.0)
    yield (
        f"simulated: {most.cluster}: our reconstruction of {most.policy} over DP-EV: at most "
        f"{most.over_even:.2f}x ({most.model}){_over_servers(rows, known)}. "
        f"Published: {most.published} ({most.published_source})."
    )


def _over_servers(rows: Sequence[Row], own: Sequence[Row]) -> str:
    """The largest gain over data parallelism with parameter servers, a baseline of HeteroG."""
    if own[0].policy != "HeteroG":
        return ""
    servers = {row.model: row.over_even for row in rows if row.policy == "DP-EV, servers"}
    gains = [
        (row.over_even / slowest, row.model)
        for row in own
        if row.over_even and (slowest := servers.get(row.model))
    ]
    if not gains:
        return ""
    most, model = max(gains)
    return f", over DP-EV with servers at most {most:.2f}x ({model})"


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Why simulated gains differ from the published ones, as far as it is known."""
    systems = {row.policy for row in rows if row.published}
    if "HAP" in systems:
        yield (
            "HAP, VGG19: two layers have 119 of the 140 million parameters. Data parallelism moves "
            "their gradients over 10.4 Gbit/s; divided by columns and rows they move only "
            "activations. Where the simulated gain is above the published one, we do not know why: "
            "the simulation has no cost of the framework, and we have not seen the published "
            "figure for this model."
        )
    if "HAP" in systems and any(row.model == "bert-moe" for row in rows):
        yield (
            "HAP, BERT-MoE: with 2 experts per GPU, data parallelism holds all experts on each "
            "GPU; where they do not fit, there is no ratio over DP-EV."
        )
    if "HeteroG" in systems:
        yield (
            "HeteroG: in a chain of layers with one update per step the order of transfers hardly "
            "matters, so over all-reduce only batches gain. Over parameter servers it gains "
            "where one tensor is most of the model. Its README has four data-parallel baselines; "
            "that two of them use servers is our reading. Models with branches are left out."
        )


def _checks(names: Iterable[str]) -> Iterator[str]:
    """Our costs beside the profile in HAP's repository."""
    if "hap-8" not in set(names):
        return
    costs = Costs(EVALUATIONS["hap-8"].cluster)
    even = (1.0 / costs.cluster.world_size,) * costs.cluster.world_size
    ours = {
        "all_reduce": costs.all_reduce(_PROBE_BYTES),
        "all_gather": costs.all_gather(_PROBE_BYTES, even),
        "reduce_scatter": costs.reduce_scatter(_PROBE_BYTES, even),
    }
    rates = ", ".join(
        f"{name} {_PROBE_BYTES / seconds_of(transfer) / 1e6:.0f} (HAP's: "
        f"{PROFILED_COLLECTIVES[name] / 1e6:.0f})"
        for name, transfer in ours.items()
    )
    yield f"Check: MB/s of collectives on hap-8, simulated and in HAP's master.py: {rates}."
    devices = costs.cluster.devices
    yield (
        f"Check: a V100 has {devices[0].flops_per_s / devices[-1].flops_per_s:.2f} times the "
        f"FLOP/s of a P100 by specification, and {PROFILED_V100 / PROFILED_P100:.2f} times in "
        "HAP's master.py, whose rates are about a quarter of ours; hap-8-profiled has them."
    )


def _interval(middle: float | None, low: float | None, high: float | None, decimals: int) -> str:
    if middle is None:
        return ""
    return f"{middle:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f})"

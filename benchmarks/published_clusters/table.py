"""What the command prints: a table per cluster, and findings with their limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from rows import Column, Row, markdown_table

from poplar.hardware.roofline import UNCALIBRATED_SPREAD
from published_clusters.published import LEFT_OUT
from published_clusters.row import BASELINE


def _range(name: str, row: Row) -> tuple[float, float, float] | None:
    if row[name] is None:
        return None
    return row[name], row[f"{name}_low"], row[f"{name}_high"]


def label(row: Row) -> str:
    """The policy, with whose it is."""
    policy: str = row["policy"]
    return f"{policy}, our reconstruction, simulated" if row["reconstructed"] else policy


COLUMNS = (
    Column("model", "model"),
    Column("policy", label),
    Column(
        "samples/s, simulated",
        partial(_range, "samples_per_second"),
        "{:.0f} ({:.0f} to {:.0f})",
    ),
    Column("over DP-EV", partial(_range, "over_even"), "{:.2f} ({:.2f} to {:.2f})"),
    Column("published", "published"),
    Column("decisions", lambda row: row["why_not"] or row["details"]),
)


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """One line per cluster and model: gains over DP-EV, with the published figure."""
    labels = {row["policy"]: label(row) for row in rows if row["policy"] != BASELINE}
    titles = ["cluster", "model", "DP-EV, samples/s", *labels.values(), "published"]
    lines = []
    for case in dict.fromkeys((row["cluster"], row["model"]) for row in rows):
        own = {row["policy"]: row for row in rows if (row["cluster"], row["model"]) == case}
        even, published = own[BASELINE], [row for row in own.values() if row["published"]]
        first = "does not fit" if even["why_not"] else COLUMNS[2].cell(even)
        cells = [_cell(own[name], even) for name in labels]
        shown = [f"{row['policy']}: {row['published']}" for row in published]
        lines.append([*case, first, *cells, *shown])
    return markdown_table(titles, lines)


def _cell(row: Row, even: Row) -> str:
    """The gain, or samples per second where DP-EV does not fit."""
    if row["samples_per_second"] is None:
        return "does not fit"
    if even["samples_per_second"] is None:
        return f"{row['samples_per_second']:.0f} samples/s"
    return COLUMNS[3].cell(row)


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Summary lines of the rows, with their limits."""
    yield (
        "simulated: no device or link of these clusters was measured by us. Ranges are over all "
        f"devices {100 * UNCALIBRATED_SPREAD:.0f} % faster or slower and links 30 %, and over one "
        "type of device slower than the others."
    )
    for name in dict.fromkeys(row["cluster"] for row in rows):
        yield from _largest_gain([row for row in rows if row["cluster"] == name])
    yield f"Left out: {LEFT_OUT}."


def _largest_gain(rows: Sequence[Row]) -> Iterator[str]:
    own = [row for row in rows if row["published"]]
    known = [row for row in own if row["over_even"] is not None]
    if not known:
        return
    most = max(known, key=lambda row: row["over_even"] or 0.0)
    yield (
        f"simulated: {most['cluster']}: our reconstruction of {most['policy']} over DP-EV: at most "
        f"{most['over_even']:.2f}x ({most['model']}){_over_servers(rows, known)}. "
        f"Published: {most['published']} ({most['published_source']})."
    )


def _over_servers(rows: Sequence[Row], own: Sequence[Row]) -> str:
    """The largest gain over data parallelism with parameter servers, a baseline of HeteroG."""
    if own[0]["policy"] != "HeteroG":
        return ""
    servers = {row["model"]: row["over_even"] for row in rows if row["policy"] == "DP-EV, servers"}
    gains = [
        (row["over_even"] / slowest, row["model"])
        for row in own
        if row["over_even"] and (slowest := servers.get(row["model"]))
    ]
    if not gains:
        return ""
    most, model = max(gains)
    return f", over DP-EV with servers at most {most:.2f}x ({model})"

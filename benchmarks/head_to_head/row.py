"""Rows of `train.py`: one configuration on one cluster. `figures.py` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rows import Row, read_rows

from head_to_head.peers import UNEVEN_PEERS

Key = tuple[str, str, str, int, int]


def comparison_of(row: Row) -> Key:
    """Cluster, model, size, context and global batch, which comparable rows share."""
    cluster, model, size, context, batch = (
        row[name] for name in ("cluster", "model", "size", "context", "global_batch")
    )
    return cluster, model, size, context, batch


def takes_all_ranks(row: Row) -> bool:
    """Uses all ranks of the cluster."""
    return len(row["ranks"]) == len(row["calibrated_speeds"])


def is_plan(row: Row, *policies: str) -> bool:
    """A plan of Poplar by one of these policies, for all ranks, on the transport that it chose."""
    ours = row["provider"] == "poplar" and row["policy"] in policies
    return ours and takes_all_ranks(row) and not row["over_gloo"]


def is_peer(row: Row) -> bool:
    """Another engine in its usual form, with even batches."""
    return row["provider"] != "poplar" and row["policy"] == "even"


def over_uneven(row: Row) -> float | None:
    """Speed over the faster of the peers with uneven batches set manually at this stage."""
    ratios = [
        row["over"][name]
        for name, (_, stage) in UNEVEN_PEERS.items()
        if stage == row["stage"] and name in row["over"]
    ]
    return min(ratios, default=None)


def in_order(own: Sequence[Row]) -> list[Row]:
    """Sorted by stage; configurations that use a subset of the ranks come last."""
    return sorted(own, key=lambda row: (not takes_all_ranks(row), row["stage"]))


def latest_rows(path: Path) -> list[Row]:
    """Saved rows; of a comparison that was run twice, the later run.

    Raises:
        ValueError: a line that is no row; the message names it.
    """
    found: dict[Key, list[Row]] = {}
    for row in read_rows(path, "train"):
        own = found.setdefault(comparison_of(row), [])
        if own and own[0]["run"] != row["run"]:
            own.clear()
        own.append(row)
    return [row for own in found.values() for row in own]


def comparisons_of(found: Sequence[Row]) -> dict[str, list[Row]]:
    """Comparable rows, by the cluster's name and, if needed, what distinguishes two of them."""
    comparisons: dict[Key, list[Row]] = {}
    for row in found:
        comparisons.setdefault(comparison_of(row), []).append(row)
    clusters = [cluster for cluster, *_ in comparisons]
    return {
        cluster
        if clusters.count(cluster) == 1
        else f"{cluster}, {model} {size}, {batch} samples of {context} bytes": own
        for (cluster, model, size, context, batch), own in comparisons.items()
    }

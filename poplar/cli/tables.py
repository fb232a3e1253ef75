"""Tables for people: what the doctor found, what was measured, plans beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from poplar.formatting import format_bytes, format_ranks, format_signed_percent
from poplar.plan import Plan
from poplar.planner.explanation import Explanation
from poplar.profile import ClusterProfile, DeviceProfile

if TYPE_CHECKING:
    from poplar.doctor import Report

_COLOURS = {"problem": "bold red", "advice": "yellow"}


def doctor(report: Report) -> list[Table | Text]:
    """What every rank says of itself, what all say alike, and what was found."""
    header, *rows = report.table()
    ranks = _table(*header)
    for row in rows:
        ranks.add_row(*row)
    facts = Table.grid(padding=(0, 2))
    for name, value in report.shared():
        facts.add_row(Text(name, style="bold"), Text(value))
    found = [
        Text.assemble((finding.kind, _COLOURS[finding.kind]), str(finding)[len(finding.kind) :])
        for finding in report.findings
    ]
    return [ranks, facts, *(found or [Text("nothing found: these ranks can train", "green")])]


def profile(cluster: ClusterProfile) -> list[Table | Text]:
    """What was measured of every rank, and between them."""
    ranks = _table("rank", "device", "memory", "batches", "best speed", "optimizer step")
    for rank, device in enumerate(cluster.devices):
        ranks.add_row(
            str(rank),
            device.name,
            format_bytes(device.memory_bytes),
            f"1 to {device.max_batch}, {len(device.points)} measured",
            _best_speed(device),
            _seconds(device.optimizer_seconds),
        )
    network = cluster.network
    lines = [
        Text(
            f"{cluster.model.numel:,} trained elements in {len(cluster.model.unit_numels)} units; "
            f"reduction of all gradients {_seconds(network.reduce_scatter_seconds)}, gather of all "
            f"parameters {_seconds(network.all_gather_seconds)}"
        ),
        *(Text(note, "yellow") for note in cluster.notes),
    ]
    return [ranks, *lines]


def plans(found: Mapping[str, Plan | str], first: str) -> Table:
    """Plans beside each other, by their predictions; of those that are none, why.

    Args:
        found: a plan or a reason by name.
        first: what the names are.
    """
    table = _table(first, "stage", "step", "samples/s", "of the best", "most memory", "bound by")
    best = min(
        (_step_seconds(plan) for plan in found.values() if isinstance(plan, Plan)), default=None
    )
    for name, plan in found.items():
        if isinstance(plan, str):
            table.add_row(name, "", "", "", "", "", Text(plan, "yellow"))
            continue
        prediction, seconds = plan.prediction or {}, _step_seconds(plan)
        table.add_row(
            name,
            str(plan.stage),
            _seconds(seconds),
            f"{prediction['samples_per_second']:.1f}",
            f"{(best or seconds) / seconds:.2f}x",
            format_bytes(max(prediction["memory_bytes"])),
            prediction["bound"],
        )
    return table


def explanation(explained: Explanation) -> list[Table | Text]:
    """What bounds a plan, then what would help, then what each kind of device is worth."""
    helps = _table("what would help", "how much", "gain", "then stage")
    for change in explained.changes:
        whose = f"{change.whose} ({change.device})" if change.device else change.whose
        helps.add_row(whose, change.amount, format_signed_percent(change.gain), str(change.stage))
    if not explained.changes:
        helps.add_row("nothing that was tried", "", "", "")
    worth = _table("without", "device", "samples/s", "so")
    for one in explained.contributions:
        change_of_speed = "" if one.without is None else format_signed_percent(one.without)
        worth.add_row(
            format_ranks(one.ranks), one.device, change_of_speed, one.advice or one.verdict
        )
    told = [Text(sentence) for sentence in explained.sentences()]
    return [*told, helps, *([worth] if explained.contributions else [])]


def _step_seconds(plan: Plan) -> float:
    return float((plan.prediction or {})["step_seconds"])


def _best_speed(device: DeviceProfile) -> str:
    best = max(device.points, key=lambda point: point.batch / point.seconds)
    return f"{best.batch / best.seconds:.4g} samples/s at {best.batch}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _table(*header: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in header:
        table.add_column(name)
    return table

"""The report of a recorded run: one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import poplar
from poplar.monitoring.activity import ACTIVITIES, seconds_by_activity, stretches
from poplar.monitoring.reasons import prediction_of, reasons
from poplar.monitoring.record import Run, RunRecord
from poplar.values import formatting
from poplar.values.plan import STRATEGIES, Plan
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATES = Path(__file__).with_name("templates")


def write_report(record: RunRecord, path_html: str | Path) -> None:
    """Write the report of a run: one HTML file with a light, a dark and a print style.

    Args:
        record: the profile and the runs; the plan of the last run is explained.
        path_html: the file to write; its folder is created if missing.

    Raises:
        ImportError: matplotlib or jinja2 is not installed; says how to install it.
    """
    try:
        page = _render(record, _draw(record))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("matplotlib", "jinja2"):
            raise
        raise ImportError(
            f"reports need {package}, which is not installed; pip install 'poplar-zero[report]'"
        ) from error

    path = Path(path_html)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _render(record: RunRecord, figures: Mapping[str, Figure]) -> str:
    """The page; its text is escaped, and a section whose figure is missing is left out."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from poplar.monitoring.style import to_svg

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(_FILTERS)
    prediction = prediction_of(record.profile, record.chosen.plan)
    return environment.get_template("report.html").render(
        record=record,
        pictures={name: Markup(to_svg(figure, name)) for name, figure in figures.items()},
        predicted=prediction,
        why=list(reasons(record.profile, record.chosen.plan, prediction)),
        activities=ACTIVITIES,
        about_losses=_compared_losses(record),
        notes=_notes(record.profile),
        facts=_facts(record.profile),
        version=poplar.__version__,
    )


def _draw(record: RunRecord) -> dict[str, Figure]:
    """Draw everything that was recorded, by file name."""
    from poplar.monitoring.curves import draw_curves
    from poplar.monitoring.losses import draw_losses
    from poplar.monitoring.predictions import draw_predictions, draw_similar_plans
    from poplar.monitoring.steps import draw_steps

    plan = record.chosen.plan
    drawn = {
        "curves": draw_curves(record.profile, plan),
        "timeline": draw_steps(record.runs),
        "losses": draw_losses(record.runs),
        "predictions": draw_predictions(record.runs),
        "similar_plans": draw_similar_plans(record.similar_plans or (), plan, record.profile),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _compared_losses(record: RunRecord) -> str:
    """The largest difference of the losses: a plan changes the time of a step, not its gradient."""
    chosen, *others = reversed(record.runs)
    apart = [
        max(abs(a - b) for a, b in zip(run.losses, chosen.losses, strict=False))
        for run in others
        if run.losses and chosen.losses
    ]
    if not apart:
        return "The loss of the global batch."
    apart_by = f"differ by at most {max(apart):.2g}" if max(apart) else "are the same"
    return (
        f"Same model, seed and global batches: over {len(chosen.losses)} steps the losses "
        f"{apart_by}. The plan changes the time of a step, not what it computes."
    )


def _notes(profile: ClusterProfile) -> list[str]:
    throttled = [
        f"Rank {rank} ran below its clock rate during the measurement: {device.throttled}."
        for rank, device in enumerate(profile.devices)
        if device.throttled
    ]
    return [*throttled, *profile.notes]


def _facts(profile: ClusterProfile) -> list[tuple[str, str]]:
    """Hardware and versions, by name."""
    identity = {name: str(value) for name, value in sorted(profile.identity.items()) if value}
    facts = [(name.replace("_", " "), value) for name, value in identity.items()]
    hosts = list(dict.fromkeys(device.host for device in profile.devices if device.host))
    if hosts and "host" not in profile.identity:
        facts.append(("host", ", ".join(hosts)))
    for rank, device in enumerate(profile.devices):
        if device.uuid:
            facts.append((f"rank {rank}", f"{device.name}, {device.uuid}"))
    return facts


def _stage_name(plan: Plan) -> str:
    return STRATEGIES[plan.stage].replace("_", " ")


def _best_point(device: DeviceProfile) -> BatchPoint:
    return max(device.points, key=lambda point: point.batch / point.seconds)


def _seconds_by_rank(run: Run) -> list[dict[str, float]]:
    return [seconds_by_activity(row) for row in stretches(run.spans)]


_FILTERS = {
    "best_point": _best_point,
    "bytes": formatting.format_bytes,
    "count": formatting.format_count,
    "passes": formatting.format_passes,
    "percent": formatting.format_percent,
    "seconds": formatting.format_seconds,
    "seconds_by_rank": _seconds_by_rank,
    "signed_percent": formatting.format_signed_percent,
    "stage_name": _stage_name,
}

"""Reports as one HTML file that loads nothing: of a recorded run, and pages in its style."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import poplar
from poplar.monitoring.activity import ACTIVITIES, seconds_by_activity, stretches
from poplar.monitoring.record import RunRecord
from poplar.planner.explain import explain
from poplar.planner.memory_shortfall import DoesNotFit
from poplar.planner.prediction import Prediction, predict
from poplar.values import formatting
from poplar.values.plan import STRATEGIES, Plan
from poplar.values.profile import ClusterProfile
from poplar.values.regular_files import naming
from poplar.values.schema import from_fields

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATES = Path(__file__).with_name("templates")
_MAX_CHANGES = 3


def write_report(record: RunRecord, path_html: str | Path) -> None:
    """Write the report of a run: one HTML file with a light, a dark and a print style.

    Args:
        record: the profile and the runs; the plan of the last run is explained.
        path_html: the file to write; its folder is created if missing.

    Raises:
        ImportError: matplotlib or jinja2 is not installed; says how to install it.
    """
    with _says_what_to_install():
        values = _values(record, _draw(record))
    write_page(path_html, "report.html", **values)


def write_page(path_html: str | Path, template: str, **values: Any) -> None:
    """Write a page of a template in the style of reports.

    Args:
        path_html: the file to write; its folder is created if missing.

    Raises:
        ImportError: jinja2 is not installed; says how to install it.
    """
    with _says_what_to_install():
        page = _page(template, **values)
    path = Path(path_html)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        path.write_text(page, encoding="utf-8")


@contextmanager
def _says_what_to_install() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("matplotlib", "jinja2"):
            raise
        raise ImportError(
            f"reports need {package}, which is not installed; pip install jinja2 matplotlib"
        ) from error


def _page(template: str, **values: Any) -> str:
    """The page; its text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(_FILTERS)
    return environment.get_template(template).render(version=poplar.__version__, **values)


def _values(record: RunRecord, figures: Mapping[str, Figure]) -> dict[str, Any]:
    """What the report's template names. A section whose figure is missing is left out."""
    from markupsafe import Markup

    from poplar.monitoring.style import to_svg

    prediction = prediction_of(record.profile, record.chosen.plan)
    return {
        "record": record,
        "pictures": {name: Markup(to_svg(figure, name)) for name, figure in figures.items()},
        "predicted": prediction,
        "why": list(reasons(record.profile, record.chosen.plan, prediction)),
        "activities": ACTIVITIES,
        "about_losses": _compared_losses(record),
        "notes": _notes(record.profile),
        "facts": _facts(record.profile),
    }


def _draw(record: RunRecord) -> dict[str, Figure]:
    """Draw everything that was recorded, by file name."""
    from poplar.monitoring import pictures, style

    with style.applied():
        drawn = {
            "curves": pictures.draw_curves(record.profile, record.chosen.plan),
            "timeline": pictures.draw_steps(record.runs),
            "losses": pictures.draw_losses(record.runs),
            "predictions": pictures.draw_predictions(record.runs),
        }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _compared_losses(record: RunRecord) -> str:
    """The largest difference of the losses: a plan changes the time of a step, not its gradient."""
    chosen, *others = reversed(record.runs)
    apart = [
        abs(a - b)
        for run in others
        if run.first_step == chosen.first_step
        for a, b in zip(run.losses, chosen.losses, strict=False)
        if a is not None and b is not None
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


_FILTERS: Mapping[str, Callable[[Any], object]] = {
    "best_point": lambda device: max(device.points, key=lambda one: one.batch / one.seconds),
    "bytes": formatting.format_bytes,
    "count": formatting.format_count,
    "passes": formatting.format_passes,
    "percent": formatting.format_percent,
    "seconds": formatting.format_seconds,
    "seconds_by_rank": lambda run: list(map(seconds_by_activity, stretches(run.spans))),
    "signed_percent": formatting.format_signed_percent,
    "stage_name": lambda plan: STRATEGIES[plan.stage].replace("_", " "),
}


def prediction_of(profile: ClusterProfile, plan: Plan) -> Prediction | None:
    """The prediction in the plan, which trial runs may have refined, or that of the profile.

    None: the plan goes beyond what was measured, or does not fit.
    """
    stored = plan.prediction or {}
    names = {member.name for member in dataclasses.fields(Prediction)}
    if names <= stored.keys():
        return from_fields(Prediction, {name: stored[name] for name in names})
    try:
        return predict(profile, plan)
    except ValueError:
        return None


def reasons(profile: ClusterProfile, chosen: Plan, prediction: Prediction | None) -> Iterator[str]:
    """Why a plan was chosen, in sentences."""
    if prediction is None:
        yield "This plan cannot be predicted: it goes beyond what was measured."
        return
    seconds = formatting.format_seconds(prediction.step_seconds)
    interval = formatting.format_interval(prediction.step_seconds, prediction.step_interval)
    yield f"A step is predicted to take {seconds} ({interval}), bound by {prediction.bound}."
    if prediction.optimality_gap:
        yield (
            "On the measured curves, no other plan of this stage is faster by more than "
            f"{100 * prediction.optimality_gap:.1f} % of the step."
        )
    with suppress(DoesNotFit):
        explanation = explain(profile, chosen)
        for sentence in explanation.sentences()[1:]:
            yield f"{sentence[0].upper()}{sentence[1:]}."
        for change in explanation.changes[:_MAX_CHANGES]:
            yield f"What would help: {change}."

"""The HTML page of a report: profile, plan, reasons, and measurements beside predictions.

The page is one file: style, pictures and text are inside; it has no scripts and loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

import poplar
from poplar.planner.prediction import Prediction
from poplar.report import markup
from poplar.report.activity import ACTIVITIES, seconds_by_activity, stretches
from poplar.report.draw_curves import draw_curves
from poplar.report.draw_losses import draw_losses
from poplar.report.draw_predictions import draw_predictions, draw_similar_plans
from poplar.report.draw_steps import draw_steps
from poplar.report.reasons import Alternative, Reasons, reasons
from poplar.report.record import Run, RunRecord
from poplar.report.theme import to_svg
from poplar.values.formatting import (
    format_bytes,
    format_count,
    format_passes,
    format_percent,
    format_seconds,
    format_signed_percent,
)
from poplar.values.plan import STRATEGIES
from poplar.values.profile import ClusterProfile

_STYLE_SHEET = Path(__file__).with_name("page.css")
_UNKNOWN = "–"


def draw_pictures(record: RunRecord) -> dict[str, Figure]:
    """Draw everything that was recorded, by file name."""
    plan = record.chosen.plan
    drawn = {
        "curves": draw_curves(record.profile, plan),
        "timeline": draw_steps(record.runs),
        "losses": draw_losses(record.runs),
        "predictions": draw_predictions(record.runs),
        "similar_plans": draw_similar_plans(record.similar_plans or (), plan, record.profile),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def render_page(record: RunRecord, pictures: Mapping[str, Figure]) -> str:
    """Render the page.

    Args:
        record: the profile and the runs.
        pictures: from `draw_pictures`; a section whose picture is missing is left out.
    """
    drawn = {name: to_svg(picture, name) for name, picture in pictures.items()}
    why = reasons(record.profile, record.chosen.plan)
    body = "".join(
        [
            _head(record),
            _what_was_measured(record.profile, drawn),
            _the_plan(record, why.prediction),
            _why(why),
            _one_step(record, drawn),
            _losses(record, drawn),
            _predicted_and_measured(record, drawn),
            _similar_plans(record, drawn),
            _hardware(record.profile),
            f"<footer>Written by Poplar {escape(poplar.__version__)}.</footer>",
        ]
    )
    style = _STYLE_SHEET.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(record.title)}</title><style>{style}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _head(record: RunRecord) -> str:
    chosen, *others = reversed(record.runs)
    figures = [("samples per second", f"{chosen.samples_per_second:.1f}")]
    figures += [
        (
            f"the speed of “{run.name}”",
            f"{chosen.samples_per_second / run.samples_per_second:.2f} ×",
        )
        for run in reversed(others)
    ]
    if record.sum_of_speeds is not None:
        figures.append(
            (
                "of the sum of speeds",
                format_percent(chosen.samples_per_second / record.sum_of_speeds),
            )
        )
    figures.append(("median step", format_seconds(chosen.measured_step_seconds)))
    if chosen.prediction_error is not None:
        figures.append(("prediction error", format_signed_percent(chosen.prediction_error)))
    plan = chosen.plan
    lead = (
        f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}, stage {plan.stage} "
        f"({STRATEGIES[plan.stage].replace('_', ' ')}), {plan.global_batch} samples per step."
    )
    yardstick = (
        markup.paragraph(
            "The sum of speeds is that of plain PyTorch passes without communication, all ranks "
            f"at once, each at its best batch: {record.sum_of_speeds:.1f} samples per second."
        )
        if record.sum_of_speeds is not None
        else ""
    )
    return (
        f'<header><h1>{escape(record.title)}</h1><p class="lead">{escape(lead)}</p>{yardstick}'
        f"{markup.tiles(figures)}</header>"
    )


def _what_was_measured(profile: ClusterProfile, drawn: Mapping[str, str]) -> str:
    notes = [
        f"Rank {rank} ran below its clock rate during the measurement: {device.throttled}."
        for rank, device in enumerate(profile.devices)
        if device.throttled
    ]
    notes += profile.notes
    return markup.section(
        "What was measured",
        markup.figure(
            drawn["curves"],
            "All ranks were measured at once. The planner interpolates between measured points, "
            "and plans no larger batch than the largest measured one.",
        ),
        _measured_devices(profile),
        markup.definitions(_measured_figures(profile)),
        markup.bullets(notes) if notes else "",
    )


def _measured_devices(profile: ClusterProfile) -> str:
    headings = (
        "rank",
        "device",
        "memory limit",
        "best samples/s",
        "at a batch of",
        "largest batch measured",
        "optimizer step, whole state",
    )
    rows = []
    for rank, device in enumerate(profile.devices):
        best = max(device.points, key=lambda point: point.batch / point.seconds)
        rows.append(
            [
                str(rank),
                device.name,
                format_bytes(device.memory_bytes),
                f"{best.batch / best.seconds:.1f}",
                str(best.batch),
                str(device.max_batch),
                format_seconds(device.optimizer_seconds),
            ]
        )
    return markup.table(headings, rows, left=(0, 1))


def _measured_figures(profile: ClusterProfile) -> list[tuple[str, str]]:
    model, network = profile.model, profile.network
    parameters = f"{format_count(model.numel)} trained parameters"
    return [
        ("model", f"{parameters} in {len(model.unit_numels)} units"),
        ("reduce-scatter of all gradients", format_seconds(network.reduce_scatter_seconds)),
        ("all-gather of all parameters", format_seconds(network.all_gather_seconds)),
        ("communication overlapped with compute", format_percent(profile.overlap)),
        ("backward as a fraction of a pass", format_percent(profile.backward_fraction)),
        ("memory that plans leave free", format_percent(profile.memory_reserve)),
    ]


def _the_plan(record: RunRecord, prediction: Prediction | None) -> str:
    plan, profile = record.chosen.plan, record.profile
    recomputes = any(unit.recomputed_on for unit in plan.units)
    rows: list[list[markup.Cell]] = []
    for rank, device in enumerate(profile.devices):
        row: list[markup.Cell] = [
            str(rank),
            device.name,
            str(plan.samples(rank)),
            format_passes(plan.micro_batches[rank]),
            "whole" if plan.stage == 0 else f"{100 * plan.shares[rank]:.1f} %",
        ]
        if recomputes:
            row.append(str(len(plan.recomputed_units(rank))))
        if prediction is not None:
            needed = prediction.memory_bytes[rank]
            row += [
                format_seconds(prediction.compute_seconds[rank]),
                markup.bar(
                    needed / device.memory_bytes if device.memory_bytes else 0.0,
                    f"{format_bytes(needed)} of {format_bytes(device.memory_bytes)}",
                ),
                format_percent(prediction.busy_fraction[rank]),
            ]
        rows.append(row)
    headings = ["rank", "device", "samples", "passes", "share of state"]
    if recomputes:
        headings.append("recomputed units")
    if prediction is not None:
        headings += ["compute, predicted", "memory, predicted", "busy"]
    return markup.section(
        "The plan",
        markup.paragraph(
            f"Stage {plan.stage} ({STRATEGIES[plan.stage].replace('_', ' ')}), "
            f"{plan.global_batch} samples per step. Passes are listed in the order they run: "
            "3x8 is three micro-batches of 8 samples."
        ),
        markup.table(headings, rows, left=(0, 1, 3, 6)),
    )


def _why(why: Reasons) -> str:
    return markup.section(
        "Why this plan",
        markup.bullets(why.sentences),
        _alternatives(
            why.stages, "stage", "what is sharded", "Predictions for the best plan of each stage."
        ),
        _alternatives(
            why.policies,
            "policy",
            "how it assigns samples",
            "Predictions for the plans of other policies at this stage.",
        ),
    )


def _alternatives(
    alternatives: tuple[Alternative, ...], kind: str, meaning: str, caption: str
) -> str:
    chosen = next((a.prediction for a in alternatives if a.is_chosen), None)
    rows: list[list[markup.Cell]] = []
    for one in alternatives:
        first: list[markup.Cell] = [one.name, one.description]
        if one.plan is None or one.prediction is None:
            rows.append([*first, one.obstacle or "cannot be predicted", *[_UNKNOWN] * 4])
            continue
        slower = one.prediction.step_seconds / chosen.step_seconds - 1 if chosen else None
        rows.append(
            [
                *first,
                " ".join(str(one.plan.samples(rank)) for rank in range(one.plan.world_size)),
                format_seconds(one.prediction.step_seconds),
                "chosen"
                if one.is_chosen
                else (_UNKNOWN if slower is None else format_signed_percent(slower)),
                format_percent(one.prediction.communication_seconds / one.prediction.step_seconds),
                format_bytes(max(one.prediction.memory_bytes)),
            ]
        )
    return markup.table(
        [kind, meaning, "samples by rank", "step", "longer by", "communication", "most memory"],
        rows,
        left=(0, 1, 2),
        highlighted=[number for number, one in enumerate(alternatives) if one.is_chosen],
        caption=caption,
    )


def _one_step(record: RunRecord, drawn: Mapping[str, str]) -> str:
    if "timeline" not in drawn:
        return ""
    rows = []
    for run in record.runs:
        for rank, row in enumerate(stretches(run.spans)):
            totals = seconds_by_activity(row)
            rows.append([run.name, str(rank), *(format_seconds(totals[a]) for a in ACTIVITIES)])
    return markup.section(
        "One step",
        markup.figure(
            drawn["timeline"],
            "One traced step of each run, on one time scale. A rank waits until the last rank "
            "has reached the same collective; the rest of the collective is communication. Gaps "
            "are data loading and Python.",
        ),
        markup.table(["run", "rank", *ACTIVITIES], rows, left=(0, 1)),
    )


def _losses(record: RunRecord, drawn: Mapping[str, str]) -> str:
    if "losses" not in drawn:
        return ""
    return markup.section("Loss", markup.figure(drawn["losses"], _compared_losses(record)))


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


def _predicted_and_measured(record: RunRecord, drawn: Mapping[str, str]) -> str:
    return markup.section(
        "Predicted and measured",
        markup.figure(
            drawn["predictions"],
            "Steps measured on the slowest rank; the predictions were made before.",
        ),
        markup.table(
            ["run", "steps", "median step", "predicted", "error", "samples/s", "of sum of speeds"],
            [_measured_row(run, record.sum_of_speeds) for run in record.runs],
            highlighted=[len(record.runs) - 1],
        ),
    )


def _measured_row(run: Run, total: float | None) -> list[str]:
    predicted, error = run.predicted_step_seconds, run.prediction_error
    return [
        run.name,
        str(len(run.step_seconds)),
        format_seconds(run.measured_step_seconds),
        _UNKNOWN if predicted is None else format_seconds(predicted),
        _UNKNOWN if error is None else format_signed_percent(error),
        f"{run.samples_per_second:.1f}",
        _UNKNOWN if total is None else format_percent(run.samples_per_second / total),
    ]


def _similar_plans(record: RunRecord, drawn: Mapping[str, str]) -> str:
    if "similar_plans" not in drawn or not record.similar_plans:
        return ""
    ordered = sorted(record.similar_plans, key=lambda near: near.step_seconds)
    chosen = next((near for near in ordered if near.plan == record.chosen.plan), None)
    others = [near for near in ordered if near is not chosen]
    verdict = ""
    if chosen is not None and others:
        verdict = (
            f"The fastest of {len(others)} similar plans took "
            f"{format_seconds(others[0].step_seconds)} per step, the chosen plan "
            f"{format_seconds(chosen.step_seconds)} "
            f"({format_signed_percent(chosen.step_seconds / others[0].step_seconds - 1)})."
        )
    return markup.section(
        "Similar plans",
        markup.paragraph(verdict) if verdict else "",
        markup.figure(
            drawn["similar_plans"],
            "Plans that differ slightly from the chosen one, measured in turns with it. The "
            "fastest of many noisy measurements is partly chance.",
        ),
    )


def _hardware(profile: ClusterProfile) -> str:
    facts = [
        (name.replace("_", " "), str(value))
        for name, value in sorted(profile.identity.items())
        if value
    ]
    hosts = list(dict.fromkeys(device.host for device in profile.devices if device.host))
    if hosts and "host" not in profile.identity:
        facts.append(("host", ", ".join(hosts)))
    for rank, device in enumerate(profile.devices):
        if device.uuid:
            facts.append((f"rank {rank}", f"{device.name}, {device.uuid}"))
    return markup.section("Hardware and versions", markup.definitions(facts)) if facts else ""

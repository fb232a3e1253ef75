"""The report's page: what was measured, what was decided and why, what came of it.

One file that needs nothing else: style, pictures and text are in it, no script, no address.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

import poplar
from poplar.plan import STRATEGIES
from poplar.planner.prediction import Prediction
from poplar.profile import ClusterProfile
from poplar.report import markup, words
from poplar.report.activity import ACTIVITIES, seconds_by_activity, stretches
from poplar.report.pictures import to_svg
from poplar.report.reasons import Alternative, Reasons, reasons
from poplar.report.record import Run, RunRecord

_STYLE_SHEET = Path(__file__).with_name("page.css")
_UNKNOWN = "–"


def render_page(record: RunRecord, pictures: Mapping[str, Figure]) -> str:
    """The whole page as text.

    Args:
        record: what happened.
        pictures: what `draw_pictures` drew of it; missing ones leave their section out.
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
            _neighbours(record, drawn),
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
    figures = [("samples a second", f"{chosen.samples_per_second:.1f}")]
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
                words.percent(chosen.samples_per_second / record.sum_of_speeds),
            )
        )
    figures.append(("a step, median", words.seconds(chosen.measured_step_seconds)))
    if chosen.prediction_error is not None:
        figures.append(("prediction off by", words.signed_percent(chosen.prediction_error)))
    plan = chosen.plan
    lead = (
        f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}, stage {plan.stage} "
        f"({STRATEGIES[plan.stage].replace('_', ' ')}), {plan.global_batch} samples a step."
    )
    yardstick = (
        markup.paragraph(
            "The sum of speeds: plain PyTorch passes without communication, every rank at its best "
            f"batch, all at once: {record.sum_of_speeds:.1f} samples a second."
        )
        if record.sum_of_speeds is not None
        else ""
    )
    return (
        f'<header><h1>{escape(record.title)}</h1><p class="lead">{escape(lead)}</p>{yardstick}'
        f"{markup.tiles(figures)}</header>"
    )


def _what_was_measured(profile: ClusterProfile, drawn: Mapping[str, str]) -> str:
    rows = []
    for rank, device in enumerate(profile.devices):
        best = max(device.points, key=lambda point: point.batch / point.seconds)
        rows.append(
            [
                str(rank),
                device.name,
                words.size(device.memory_bytes),
                f"{best.batch / best.seconds:.1f}",
                str(best.batch),
                str(device.max_batch),
                words.seconds(device.optimizer_seconds),
            ]
        )
    network = profile.network
    facts = [
        (
            "model",
            f"{words.count(profile.model.numel)} trained parameters in "
            f"{len(profile.model.unit_numels)} units",
        ),
        ("reduce-scatter of all gradients", words.seconds(network.reduce_scatter_seconds)),
        ("all-gather of all parameters", words.seconds(network.all_gather_seconds)),
        ("communication that runs under compute", words.percent(profile.overlap)),
        ("backward's part of a pass", words.percent(profile.backward_fraction)),
        ("memory left free by a plan", words.percent(profile.memory_reserve)),
    ]
    throttled = [
        f"Rank {rank} ran below its clocks while it was measured: {device.throttled}."
        for rank, device in enumerate(profile.devices)
        if device.throttled
    ]
    return markup.section(
        "What was measured",
        markup.figure(
            drawn["curves"],
            "All ranks measured at once. Between measured points the planner goes in straight "
            "lines; beyond the last it assumes nothing.",
        ),
        markup.table(
            [
                "rank",
                "device",
                "memory it may use",
                "best samples/s",
                "at a batch of",
                "largest batch measured",
                "optimizer, whole state",
            ],
            rows,
            left=(0, 1),
        ),
        markup.definitions(facts),
        markup.bullets([*throttled, *profile.notes]) if throttled or profile.notes else "",
    )


def _the_plan(record: RunRecord, prediction: Prediction | None) -> str:
    plan, profile = record.chosen.plan, record.profile
    rows: list[list[markup.Cell]] = []
    for rank, device in enumerate(profile.devices):
        row: list[markup.Cell] = [
            str(rank),
            device.name,
            str(plan.samples(rank)),
            words.passes(plan.micro_batches[rank]),
            "whole" if plan.stage == 0 else f"{100 * plan.shares[rank]:.1f} %",
        ]
        if prediction is not None:
            needed = prediction.memory_bytes[rank]
            row += [
                words.seconds(prediction.compute_seconds[rank]),
                markup.bar(
                    needed / device.memory_bytes if device.memory_bytes else 0.0,
                    f"{words.size(needed)} of {words.size(device.memory_bytes)}",
                ),
                words.percent(prediction.busy_fraction[rank]),
            ]
        rows.append(row)
    headings = ["rank", "device", "samples", "passes", "share of state"]
    if prediction is not None:
        headings += ["compute, predicted", "memory, predicted", "busy"]
    return markup.section(
        "The plan",
        markup.paragraph(
            f"Stage {plan.stage} ({STRATEGIES[plan.stage].replace('_', ' ')}), "
            f"{plan.global_batch} samples a step. Passes are micro-batches in the order they run."
        ),
        markup.table(headings, rows, left=(0, 1, 3, 6)),
    )


def _why(why: Reasons) -> str:
    return markup.section(
        "What it decided and why",
        markup.bullets(why.sentences),
        _alternatives(
            why.stages, "stage", "what is sharded", "The best plan of each stage, predicted."
        ),
        _alternatives(
            why.policies,
            "policy",
            "how it gives out samples",
            "What other policies would have decided at this stage, predicted.",
        ),
    )


def _alternatives(
    alternatives: tuple[Alternative, ...], kind: str, meaning: str, caption: str
) -> str:
    chosen = next((a.prediction for a in alternatives if a.is_chosen), None)
    rows: list[list[markup.Cell]] = []
    for one in alternatives:
        first: list[markup.Cell] = [one.name, one.what]
        if one.plan is None or one.prediction is None:
            rows.append([*first, one.obstacle or "not predictable", *[_UNKNOWN] * 4])
            continue
        slower = one.prediction.step_seconds / chosen.step_seconds - 1 if chosen else None
        rows.append(
            [
                *first,
                " ".join(str(one.plan.samples(rank)) for rank in range(one.plan.world_size)),
                words.seconds(one.prediction.step_seconds),
                "chosen"
                if one.is_chosen
                else (_UNKNOWN if slower is None else words.signed_percent(slower)),
                words.percent(one.prediction.communication_seconds / one.prediction.step_seconds),
                words.size(max(one.prediction.memory_bytes)),
            ]
        )
    return markup.table(
        [kind, meaning, "samples by rank", "a step", "longer", "communication", "most memory"],
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
            rows.append([run.name, str(rank), *(words.seconds(totals[a]) for a in ACTIVITIES)])
    return markup.section(
        "One step",
        markup.figure(
            drawn["timeline"],
            "One traced step of each run, on one scale. A rank waits until the last one has come "
            "to the same collective; from then on it is communication. Gaps are loading and "
            "Python.",
        ),
        markup.table(["run", "rank", *ACTIVITIES], rows, left=(0, 1)),
    )


def _losses(record: RunRecord, drawn: Mapping[str, str]) -> str:
    if "losses" not in drawn:
        return ""
    return markup.section("Loss", markup.figure(drawn["losses"], _compared_losses(record)))


def _compared_losses(record: RunRecord) -> str:
    """How far the curves are apart: a plan changes the time of a step, not its gradient."""
    chosen, *others = reversed(record.runs)
    apart = [
        max(abs(a - b) for a, b in zip(run.losses, chosen.losses, strict=False))
        for run in others
        if run.losses and chosen.losses
    ]
    if not apart:
        return "The loss of the whole global batch."
    apart_by = f"differ by at most {max(apart):.2g}" if max(apart) else "are the same"
    return (
        "Same model, same seed, same global batches: over "
        f"{len(chosen.losses)} steps the losses {apart_by}. The plan "
        "changes when a step ends, not what it computes."
    )


def _predicted_and_measured(record: RunRecord, drawn: Mapping[str, str]) -> str:
    return markup.section(
        "Predicted beside measured",
        markup.figure(
            drawn["predictions"],
            "Steps as measured on the slowest rank; predictions were made before.",
        ),
        markup.table(
            ["run", "steps", "measured, median", "predicted", "difference", "samples/s", "of sum"],
            [_measured_row(run, record.sum_of_speeds) for run in record.runs],
            highlighted=[len(record.runs) - 1],
        ),
    )


def _measured_row(run: Run, total: float | None) -> list[str]:
    predicted, error = run.predicted_step_seconds, run.prediction_error
    return [
        run.name,
        str(len(run.step_seconds)),
        words.seconds(run.measured_step_seconds),
        _UNKNOWN if predicted is None else words.seconds(predicted),
        _UNKNOWN if error is None else words.signed_percent(error),
        f"{run.samples_per_second:.1f}",
        _UNKNOWN if total is None else words.percent(run.samples_per_second / total),
    ]


def _neighbours(record: RunRecord, drawn: Mapping[str, str]) -> str:
    if "neighbours" not in drawn or not record.neighbours:
        return ""
    ordered = sorted(record.neighbours, key=lambda near: near.step_seconds)
    chosen = next((near for near in ordered if near.plan == record.chosen.plan), None)
    others = [near for near in ordered if near is not chosen]
    verdict = ""
    if chosen is not None and others:
        verdict = (
            f"Of {len(others)} plans near by, the fastest took "
            f"{words.seconds(others[0].step_seconds)} a step, the chosen one "
            f"{words.seconds(chosen.step_seconds)} "
            f"({words.signed_percent(chosen.step_seconds / others[0].step_seconds - 1)})."
        )
    return markup.section(
        "Plans near by",
        markup.paragraph(verdict) if verdict else "",
        markup.figure(
            drawn["neighbours"],
            "Plans that differ a little from the chosen one, measured in turns with it. The "
            "fastest of many noisy measurements owes a part of its place to luck.",
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

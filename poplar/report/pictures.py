"""All pictures of a report, by file name."""

from __future__ import annotations

from matplotlib.figure import Figure

from poplar.report.draw_curves import draw_curves
from poplar.report.draw_losses import draw_losses
from poplar.report.draw_predictions import draw_predictions, draw_similar_plans
from poplar.report.draw_steps import draw_steps
from poplar.report.record import RunRecord
from poplar.report.theme import to_svg, write_png

__all__ = ["draw_pictures", "to_svg", "write_png"]


def draw_pictures(record: RunRecord) -> dict[str, Figure]:
    """Draw everything that was recorded."""
    chosen = record.chosen.plan
    drawn = {
        "curves": draw_curves(record.profile, chosen),
        "timeline": draw_steps(record.runs),
        "losses": draw_losses(record.runs),
        "predictions": draw_predictions(record.runs),
        "similar_plans": draw_similar_plans(record.similar_plans, chosen, record.profile)
        if record.similar_plans
        else None,
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}

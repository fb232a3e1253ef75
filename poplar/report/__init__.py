"""Reports of recorded runs.

A `RunRecord` is a value with JSON both ways; it needs neither torch nor the machine of the run.
`write_report` makes one HTML file of it, which opens without a network. Pictures need matplotlib
(`pip install 'poplar-zero[report]'`).
"""

from __future__ import annotations

from pathlib import Path

from poplar.report.record import Run, RunRecord, SimilarPlan
from poplar.system.trace import Span

__all__ = ["Run", "RunRecord", "SimilarPlan", "Span", "write_report"]


def write_report(
    record: RunRecord, path_html: str | Path, pictures_dir: str | Path | None = None
) -> None:
    """Write the report of a run: one HTML file with a light, a dark and a print style.

    Args:
        record: the profile and the runs; the plan of the last run is explained.
        path_html: the file to write; its folder is created if missing.
        pictures_dir: a folder for the pictures as PNG files; None: no PNG files.

    Raises:
        ImportError: matplotlib is not installed; says how to install it.
    """
    try:
        from poplar.report.page import draw_pictures, render_page
        from poplar.report.theme import write_png
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ImportError(
            "reports need matplotlib, which is not installed; pip install 'poplar-zero[report]'"
        ) from error

    pictures = draw_pictures(record)
    path = Path(path_html)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_page(record, pictures), encoding="utf-8")
    if pictures_dir is not None:
        folder = Path(pictures_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            write_png(picture, folder / f"{name}.png")

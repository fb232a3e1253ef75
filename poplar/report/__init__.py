"""A run told afterwards: what was measured, what was decided and why, what came of it.

A `RunRecord` is a value, JSON both ways, that needs neither torch nor the machine it was made on;
`write_report` turns it into one HTML file that opens from disk, without a network. Drawing takes
matplotlib (`pip install 'poplar-zero[report]'`); records do not.
"""

from __future__ import annotations

from pathlib import Path

from poplar.report.record import Neighbour, Run, RunRecord
from poplar.system.trace import Span

__all__ = ["Neighbour", "Run", "RunRecord", "Span", "write_report"]


def write_report(
    record: RunRecord, path_html: str | Path, pictures_dir: str | Path | None = None
) -> None:
    """Write a run's report: one HTML file, light and dark, fit for print.

    Args:
        record: what happened; of several runs the last is the one whose plan is explained.
        path_html: where to write; the folder is made if it is missing.
        pictures_dir: a folder for the same pictures as PNG files; None: none are written.

    Raises:
        ImportError: matplotlib is not installed; says how to install it.
    """
    try:
        from poplar.report.page import render_page
        from poplar.report.pictures import draw_pictures, write_png
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ImportError(
            "the report's pictures are drawn by matplotlib, which is not installed; "
            "pip install 'poplar-zero[report]'"
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

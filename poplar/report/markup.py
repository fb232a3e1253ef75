"""The HTML elements of a report; all text from outside is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is already HTML."""

    text: str


Cell = str | Markup


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    left: Sequence[int] = (0,),
    highlighted: Sequence[int] = (),
    caption: str = "",
) -> str:
    """A table; columns are right-aligned numbers, except those in `left`.

    Args:
        headings: one per column.
        rows: one cell per column each.
        left: indices of the columns with text.
        highlighted: indices of the rows to emphasize.
        caption: also for screen readers.
    """
    css = ["w" if column in left else "n" for column in range(len(headings))]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(heading)}</th>'
        for kind, heading in zip(css, headings, strict=True)
    )
    body = "".join(
        f"<tr{' class=chosen' if number in highlighted else ''}>"
        + "".join(
            f'<td class="{kind}">{_cell(cell)}</td>' for kind, cell in zip(css, row, strict=True)
        )
        + "</tr>"
        for number, row in enumerate(rows)
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bar(fraction: float, label: str) -> Markup:
    """A small bar with a label; above 1 it is full and marked."""
    width = 100 * min(1.0, max(0.0, fraction))
    css = "bar over" if fraction > 1.0 else "bar"
    return Markup(
        f'<span class="{css}" aria-hidden="true"><i style="width:{width:.1f}%"></i></span> '
        f"{escape(label)}"
    )


def figure(svg: str, caption: str) -> str:
    """A picture with its caption, which is also its label for screen readers."""
    described = svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
    return f"<figure>{described}<figcaption>{escape(caption)}</figcaption></figure>"


def section(title: str, *parts: str) -> str:
    """A heading and its content."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def paragraph(text: str) -> str:
    """One paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def bullets(lines: Iterable[str]) -> str:
    """A list of plain text items."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Large figures with their names, as (name, value)."""
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>" for what, value in values
        )
        + "</dl>"
    )


def definitions(values: Iterable[tuple[str, str]]) -> str:
    """A definition list of (name, value)."""
    return (
        '<dl class="facts">'
        + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values)
        + "</dl>"
    )


def _cell(cell: Cell) -> str:
    return cell.text if isinstance(cell, Markup) else escape(cell)

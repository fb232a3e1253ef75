"""Draw the README's picture: one optimizer step under the even plan and under Poplar's plan.

python examples/draw_step.py --output docs/assets

The cluster is simulated: `docs/assets/cluster.toml` describes it, and `poplar simulate` estimates
its speeds from published measurements. The picture says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

import poplar
from poplar import ClusterProfile, Plan
from poplar.simulator.timeline import Timeline

CLUSTER = Path(__file__).parents[1] / "docs/assets/cluster.toml"
MODEL = "opt-350m"
GLOBAL_BATCH = 64
STAGE = 0
THEMES = {
    "light": {"text": "#1c2024", "muted": "#60656c", "waiting": "#dfe2e6"},
    "dark": {"text": "#e6edf3", "muted": "#9aa4af", "waiting": "#30363d"},
}
COLORS = {"compute": "#2a8fd0", "communication": "#e69f00", "optimizer": "#0a9a70"}
WIDTH, LEFT, RIGHT = 860, 190, 60
LANE, GAP, PANEL_TITLE = 22, 6, 34


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/assets"), metavar="FOLDER")
    folder = parser.parse_args().output
    cluster = simulated_cluster()
    request = {"global_batch": GLOBAL_BATCH, "stages": (STAGE,), "leave_out": "never"}
    panels = [
        (title, poplar.search(cluster, **request, policy=policy))
        for title, policy in (("Even batches (DDP, FSDP2, DeepSpeed)", "even"), ("Poplar", "exact"))
    ]
    timelines = [(title, plan, poplar.simulate(cluster, plan)) for title, plan in panels]
    folder.mkdir(parents=True, exist_ok=True)
    for theme, colors in THEMES.items():
        path = folder / f"step-{theme}.svg"
        path.write_text("\n".join(svg(timelines, COLORS | colors)) + "\n", encoding="utf-8")
        print(path)


def simulated_cluster() -> ClusterProfile:
    """The profile that `poplar simulate` estimates for `CLUSTER`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "poplar", "simulate", str(CLUSTER), "--model", MODEL]
        command += ["--global-batch", str(GLOBAL_BATCH), "--write-profile", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return ClusterProfile.from_json(path)


def svg(panels: Sequence[tuple[str, Plan, Timeline]], colors: dict[str, str]) -> Iterator[str]:
    """The lines of an SVG file with one panel per plan, on a common time axis."""
    ranks = len(panels[0][2].devices)
    panel = PANEL_TITLE + ranks * (LANE + GAP)
    height = len(panels) * panel + 60
    longest = max(timeline.step_seconds for _, _, timeline in panels)
    scale = (WIDTH - LEFT - RIGHT) / longest
    summary = f"Simulated: {MODEL} at stage {STAGE}, {GLOBAL_BATCH} samples a step"
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
    yield f'  role="img" font-family="sans-serif" font-size="13" fill="{colors["text"]}">'
    yield f"<title>{escape(summary)}</title>"
    for number, (title, plan, timeline) in enumerate(panels):
        top = number * panel
        yield (
            f'<text x="0" y="{top + 20}" font-weight="600">{escape(title)}: '
            f"{timeline.step_seconds:.2f} s a step</text>"
        )
        for rank, device in enumerate(timeline.devices):
            y = top + PANEL_TITLE + rank * (LANE + GAP)
            yield (
                f'<text x="0" y="{y + 15}" fill="{colors["muted"]}">'
                f"{escape(device)}: {plan.samples(rank)} samples</text>"
            )
            end = timeline.step_seconds
            yield _bar(0.0, end, y, scale, colors["waiting"])
            for kind, begin, end in activity(timeline, rank):
                yield _bar(begin, end, y, scale, colors[kind])
            busy = f"{100 * timeline.busy_fraction[rank]:.0f} %"
            x = LEFT + timeline.step_seconds * scale + 8
            yield f'<text x="{x:.1f}" y="{y + 15}" fill="{colors["muted"]}">{busy}</text>'
    yield from _legend(len(panels) * panel + 14, colors)
    yield f'<text x="0" y="{height - 8}" fill="{colors["muted"]}">{escape(_note())}</text>'
    yield "</svg>"


def activity(timeline: Timeline, rank: int) -> Iterator[tuple[str, float, float]]:
    """What the rank does when: compute over communication, adjacent spans merged."""
    spans = timeline.spans[rank]
    compute = [span for span in spans if span.stream == "compute"]
    update = [span for span in compute if span.what == "optimizer"]
    passes = [span for span in compute if span.what != "optimizer"]
    communication = [span for span in spans if span.stream == "communication"]
    for kind, chosen in (
        ("communication", communication),
        ("compute", passes),
        ("optimizer", update),
    ):
        for begin, end in merged((span.begin, span.end) for span in chosen):
            yield kind, begin, end


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, in order; gaps below a thousandth of a second are closed."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1] + 1e-3:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def _bar(begin: float, end: float, y: float, scale: float, color: str) -> str:
    x, width = LEFT + begin * scale, (end - begin) * scale
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" fill="{color}"/>'


def _legend(y: float, colors: dict[str, str]) -> Iterator[str]:
    names = ("compute", "optimizer", "communication", "waiting")
    for number, name in enumerate(names):
        x = LEFT + 130 * number
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colors[name]}"/>'
        yield f'<text x="{x + 18}" y="{y + 11}" fill="{colors["muted"]}">{name}</text>'


def _note() -> str:
    return (
        f"Simulated from published GPU measurements: {MODEL}, ZeRO stage {STAGE}, "
        f"{GLOBAL_BATCH} samples a step. Percentages: time spent computing."
    )


if __name__ == "__main__":
    main()

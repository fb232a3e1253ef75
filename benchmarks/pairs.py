"""Results by card pair: the page `docs/pairs.md` and its picture from the rows of `poplar pair`.

    python benchmarks/pairs.py > docs/pairs.md
    python benchmarks/pairs.py --picture docs/assets/pairs.svg
    python benchmarks/pairs.py --emulate 2:1 --output benchmarks/pairs/cpu-2-1.json

The last command measures CPU ranks of unequal speed instead of cards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
from emulation import Ranks, cpu_quotas, quotas_of
from launch import run_ranks
from rows import at_least, markdown_table

from poplar.pair.measure import measure
from poplar.pair.row import NAMES, PLANNED, PairRow

ROWS = Path(__file__).parent / "pairs"
QUOTA = 0.8
"""Of a core, for the fastest emulated rank: the rest is for other programs."""


def read() -> list[PairRow]:
    """All rows, those of cards first, in the order of the files' names."""
    rows = [PairRow.from_json(path) for path in sorted(ROWS.glob("*.json"))]
    return sorted(rows, key=lambda row: bool(row.emulated))


def page(rows: Sequence[PairRow]) -> Iterator[str]:
    """The lines of the page."""
    yield "# Results by card pair\n"
    yield (
        "`poplar pair` trains two sizes of a Llama, in full and by LoRA, on all cards of a machine."
        " The first figure is the speed of Poplar's plan over the sum of the cards' solo speeds: "
        "what each card reaches in plain PyTorch passes at its best batch size while all cards "
        "run, without communication. The second is this speed over that of an equal split in "
        "Poplar. DDP and FSDP2 have equal batches too. Speeds are medians of turns.\n"
    )
    yield "[Add the row of your cards](contributing.md#add-the-row-of-your-cards).\n"
    if all(row.emulated for row in rows):
        yield (
            "No row of GPUs has been added yet. Rows of CPU ranks whose speed is limited say how "
            "well a plan fits unequal ranks, and nothing about GPUs.\n"
        )
    if rows:
        yield "![Speeds over the sum of solo speeds](assets/pairs.svg)\n"
    for row in rows:
        header, *lines = row.table()
        yield f"## {row.title}\n"
        yield f"{row.headline.removeprefix(row.title + ': ').capitalize()}.\n"
        yield from markdown_table(header, lines)
        yield f"\n{'; '.join(facts(row))}.\n"


def facts(row: PairRow) -> Iterator[str]:
    """What the speeds depend on."""
    for number, card in enumerate(row.cards):
        links = f", {' and '.join(card.links)}" if card.links else ""
        yield f"rank {number}: {card.name}, {card.memory_gib:g} GiB{links}"
    if row.peer_to_peer is not None:
        yield f"peer-to-peer access: {'yes' if row.peer_to_peer else 'no'}"
    if row.hosts > 1:
        yield f"{row.hosts} hosts"
    yield ", ".join(f"{name} {version}" for name, version in row.versions.items())


def draw(rows: Sequence[PairRow], path: Path) -> None:
    """One group of bars per row and case, one bar per engine."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "pairs", "font.size": 9})
    from matplotlib import pyplot as plt

    groups = [(row, case) for row in rows for case in row.cases if case.speeds]
    figure, axes = plt.subplots(figsize=(7.0, 0.8 + 0.75 * len(groups)), layout="constrained")
    for place, engine in enumerate(NAMES):
        axes.barh(
            [number + 0.2 * place for number in range(len(groups))],
            [100.0 * (case.of_solo(engine) or 0.0) for _, case in groups],
            height=0.18,
            label=NAMES[engine],
            color="tab:green" if engine == PLANNED else str(0.35 + 0.15 * place),
        )
    axes.set_yticks(
        [number + 0.3 for number in range(len(groups))],
        [f"{row.title}\n{case.model}, {case.training}" for row, case in groups],
    )
    axes.invert_yaxis()
    axes.axvline(100.0, color="black", linewidth=0.5)
    axes.set_xlabel("percent of the sum of solo speeds")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def emulate(speeds: Sequence[float], minutes: float, output: Path) -> None:
    """Measure CPU ranks with quotas in proportion to `speeds`."""
    emulated = "CPU quotas " + ":".join(f"{speed:g}" for speed in speeds)
    with cpu_quotas(quotas_of(speeds, QUOTA)) as ranks:
        row: PairRow = run_ranks(work, len(speeds), ranks, minutes, emulated)
    row.to_json(output)
    print(row)


def work(ranks: Ranks, minutes: float, emulated: str) -> PairRow:
    """In a rank."""
    rank = torch.distributed.get_rank()
    ranks.enter(rank)
    log = print if rank == 0 else lambda line: None
    return measure(torch.device("cpu"), minutes, log, emulated)


def main() -> None:
    """Print the page, draw the picture, or measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw instead of printing")
    parser.add_argument("--emulate", metavar="SPEEDS", help="measure CPU ranks, as in 2:1")
    parser.add_argument("--minutes", type=at_least(0.1), default=5.0, help="with --emulate")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the row, with --emulate")
    options = parser.parse_args()
    if options.emulate:
        if options.output is None:
            parser.error("--emulate needs --output FILE for the row")
        emulate(
            [float(text) for text in options.emulate.split(":")], options.minutes, options.output
        )
    elif options.picture:
        draw(read(), options.picture)
    else:
        print("\n".join(page(read())).rstrip())


if __name__ == "__main__":
    main()

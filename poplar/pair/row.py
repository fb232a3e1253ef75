"""The result of `poplar pair`: one JSON object without private facts, and its table.

It has no name of a host or user, no path, address, serial number, UUID or time of day: every field
of the row is listed here, and `tests/unit/test_pair_row.py` checks the values of each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from poplar.values.formatting import format_percent, format_table
from poplar.values.schema import Document

PLANNED, EVEN = "poplar", "poplar_even"
NAMES = {PLANNED: "Poplar", EVEN: "equal split", "ddp": "DDP", "fsdp2": "FSDP2"}
"""Of the engines, in tables."""
DID_NOT_FIT = "did not fit"
NOT_TRIED = "not tried: "
"""Before what failed, in the entry of an engine that would have come after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The device of one rank."""

    name: str
    memory_gib: float
    compute_capability: str
    """Empty for a CPU."""
    links: tuple[str, ...]
    """Fastest first, as in "NVLink 4 x18", "PCIe 4 x8 (of x16)"; empty: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """One model and one way to train it. Speeds are samples per second of all ranks."""

    model: str
    training: str
    """"full" or "LoRA"."""
    dtype: str
    """Of forward and backward."""
    context: int
    """Tokens of a sample."""
    global_batch: int
    stage: int | None = None
    """Of the plan and of the equal split; None: no plan fits."""
    micro_batches: tuple[tuple[int, ...], ...] = ()
    """Of the plan, by rank and pass."""
    shares: tuple[float, ...] = ()
    """Of the sharded training state, by rank."""
    solo_speeds: tuple[float, ...] = ()
    """Of each rank in plain passes while all ranks run, without communication."""
    speeds: Mapping[str, float]
    """By engine, medians over rounds."""
    missing: Mapping[str, str]
    """By engine, why it has no speed."""
    rounds: int = 0

    def of_solo(self, engine: str) -> float | None:
        """Speed of an engine over the sum of solo speeds; None: not measured."""
        speed = self.speeds.get(engine)
        return None if speed is None else speed / sum(self.solo_speeds)

    @property
    def over_even(self) -> float | None:
        """Speed of the plan over that of the equal split; None: not measured."""
        if not {PLANNED, EVEN} <= self.speeds.keys():
            return None
        return self.speeds[PLANNED] / self.speeds[EVEN]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRow(Document):
    """All cases on one set of cards."""

    _noun: ClassVar[str] = "row"
    _version: ClassVar[int] = 1
    _remedy: ClassVar[str] = "measure again with poplar pair"

    cards: tuple[Card, ...]
    """By rank."""
    peer_to_peer: bool | None
    """Whether each card can access the memory of each other one; None: not known."""
    hosts: int
    emulated: str
    """What stands for unequal cards, as in "CPU quotas 2:1"; empty: the cards are what they are."""
    versions: Mapping[str, str]
    """poplar, its commit, torch, CUDA, NCCL, driver."""
    cases: tuple[CaseResult, ...]

    @property
    def title(self) -> str:
        """The cards, the same ones counted."""
        names = [card.name.removeprefix("NVIDIA ") for card in self.cards]
        counts = {name: names.count(name) for name in names}
        counted = (name if n == 1 else f"{n} x {name}" for name, n in counts.items())
        return " + ".join(counted) + (f", emulated: {self.emulated}" if self.emulated else "")

    @property
    def headline(self) -> str:
        """The result in one line."""
        of_solo = [one for case in self.cases if (one := case.of_solo(PLANNED)) is not None]
        if not of_solo:
            return f"{self.title}: no plan fits"
        over_even = [case.over_even for case in self.cases if case.over_even is not None]
        gain = f", {statistics.median(over_even):.2f}x an equal split" if over_even else ""
        return (
            f"{self.title}: {format_percent(statistics.median(of_solo))} of the sum of solo speeds"
            f"{gain} (median of {len(of_solo)} cases)"
        )

    def __str__(self) -> str:
        return f"{format_table(*self.table())}\n\n{self.headline}"

    def table(self) -> Iterator[Sequence[str]]:
        """The cells of a table, its header first."""
        yield (
            *("model", "training", "stage", "samples by rank", "of the sum of solo speeds"),
            *("over an equal split", *(f"{NAMES[engine]}, of the sum" for engine in (*NAMES,)[1:])),
        )
        for case in self.cases:
            over_even = "–" if case.over_even is None else f"{case.over_even:.2f}x"
            of_solo = [
                case.missing.get(engine, "–") if part is None else format_percent(part)
                for engine in NAMES
                for part in [case.of_solo(engine)]
            ]
            stage = "–" if case.stage is None else str(case.stage)
            samples = " : ".join(str(sum(own)) for own in case.micro_batches) or "–"
            yield case.model, case.training, stage, samples, of_solo[0], over_even, *of_solo[1:]

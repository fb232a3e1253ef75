"""What an examination says, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from poplar.doctor.facts import RankFacts
from poplar.doctor.finding import Finding
from poplar.doctor.words import grouped, listed, size


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All ranks of a job, and what was found; equal on all of them."""

    ranks: tuple[RankFacts, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found that training would fail on."""
        return not any(finding.kind == "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "ok": self.ok,
            "ranks": [rank.to_dict() for rank in self.ranks],
            "findings": [asdict(finding) for finding in self.findings],
        }

    def table(self) -> list[tuple[str, ...]]:
        """Rows of words, the header first: one row per rank."""
        header = ("rank", "host", "device", "memory", "held by others", "/dev/shm free", "dtypes")
        return [header, *(_row(facts) for facts in self.ranks)]

    def shared(self) -> list[tuple[str, str]]:
        """What is said of all ranks alike: name and value, several values where they differ."""
        said = [
            {
                **facts.versions,
                "operators": facts.operators,
                "transport": facts.transport,
                "links": ", ".join(facts.device.links),
            }
            for facts in self.ranks
        ]
        lines = [(name, _differing(self.ranks, [each[name] for each in said])) for name in said[0]]
        return [(name, value) for name, value in lines if value]

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += ["", *(f"{name}: {value}" for name, value in self.shared()), ""]
        lines += [str(finding) for finding in self.findings] or ["nothing found"]
        return "\n".join(lines)


def _differing(ranks: Sequence[RankFacts], values: Sequence[str]) -> str:
    groups = grouped(ranks, values)
    return values[0] if len(groups) == 1 else listed(groups)


def _row(facts: RankFacts) -> tuple[str, ...]:
    device = facts.device
    capability = "" if device.capability is None else " sm_{}{}".format(*device.capability)
    where = f"{device.name}{capability}, {device.cores} cores"
    shared = facts.shared_memory_bytes
    return (
        str(facts.rank),
        device.host,
        where if device.kind == "cpu" else f"{device.name}{capability}",
        f"{size(facts.memory_bytes)} of {size(device.total_bytes)}",
        size(device.others_bytes),
        "none" if shared is None else size(shared[0]),
        ", ".join(facts.dtypes),
    )

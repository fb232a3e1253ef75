"""The result of an examination: facts of all ranks, findings, and the table of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poplar.doctor.checks import Finding
from poplar.doctor.facts import RankFacts, describe_values
from poplar.values.formatting import format_bytes, format_usage
from poplar.values.schema import to_json_types


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The facts and findings of all ranks; equal on all ranks."""

    ranks: tuple[RankFacts, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem that training would fail on."""
        return not any(finding.kind == "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """This report as JSON types."""
        return {"ok": self.ok, **to_json_types(self)}

    def table(self) -> list[tuple[str, ...]]:
        """Rows of text: the header, then one row per rank."""
        header = ("rank", "host", "device", "memory", "used by others", "/dev/shm free", "dtypes")
        return [header, *(_row(facts) for facts in self.ranks)]

    def shared(self) -> list[tuple[str, str]]:
        """Facts that are usually equal on all ranks, as (name, value or values with ranks)."""
        by_rank = [
            {
                **facts.versions,
                "operators": facts.operators,
                "transport": facts.transport,
                "links": ", ".join(facts.device.links),
            }
            for facts in self.ranks
        ]
        lines = [
            (name, describe_values(self.ranks, [facts[name] for facts in by_rank]))
            for name in by_rank[0]
        ]
        return [(name, value) for name, value in lines if value]

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += ["", *(f"{name}: {value}" for name, value in self.shared()), ""]
        lines += [str(finding) for finding in self.findings] or ["no problems found"]
        return "\n".join(lines)


def _row(facts: RankFacts) -> tuple[str, ...]:
    device = facts.device
    capability = "" if device.capability is None else " sm_{}{}".format(*device.capability)
    shared = facts.shared_memory_bytes
    return (
        str(facts.rank),
        device.host,
        f"{device.name}, {device.cores} cores"
        if device.kind == "cpu"
        else f"{device.name}{capability}",
        format_usage(facts.memory_bytes, device.total_bytes),
        format_bytes(device.others_bytes),
        "none" if shared is None else format_bytes(shared[0]),
        ", ".join(facts.dtypes),
    )

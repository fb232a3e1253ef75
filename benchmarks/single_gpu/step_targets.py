"""Targets of one rank: time against plain autocast and FSDP2, memory against the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from verdict import CaseVerdict

from single_gpu.engines import OURS, PLAIN
from single_gpu.step_row import StepRow

OVER_PLAIN = 1.02
"""At most, of plain autocast's time."""
OVER_FSDP2 = 1.15
"""At least, of FSDP2's speed."""
MEMORY = 0.05
"""Reserved memory differs from the plan's by at most this fraction."""
LOSS = 0.02
"""The losses of two ways differ by at most this fraction after the same steps."""
SIZES = ("350M", "1.1B")
MEMORY_OF = ("1.1B", "poplar 3")
"""The case and the way whose memory is predicted, eager."""


def verdicts(rows: Sequence[StepRow]) -> Iterator[CaseVerdict]:
    """All targets that apply to the rows."""
    plain = {row.comparison: row for row in rows if row.way == PLAIN}
    for row in rows:
        if row.way not in OURS:
            continue
        case = f"{row.case}{', compiled' if row.compiled else ''}: {row.way}"
        at_most = partial(CaseVerdict, case=case, at_most=True)
        if row.case in SIZES:
            yield at_most(what="time over plain", value=row.over_plain, wanted=OVER_PLAIN)
            yield CaseVerdict(
                case=case, what="speed over FSDP2", value=row.over_fsdp2, wanted=OVER_FSDP2
            )
        if row.GiB_reserved and (row.case, row.way, row.compiled) == (*MEMORY_OF, False):
            predicted = row.GiB_predicted
            off = None if predicted is None else abs(row.GiB_reserved / predicted - 1.0)
            yield at_most(what="reserved off the plan", value=off, wanted=MEMORY)
        other = plain.get(row.comparison)
        if row.loss is not None and other is not None and other.loss is not None:
            off = abs(row.loss / other.loss - 1.0)
            yield at_most(what="loss off plain's", value=off, wanted=LOSS)

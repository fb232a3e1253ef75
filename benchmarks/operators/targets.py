"""The performance targets of the kernels.

Bytes that each implementation of `chain` moves per element. They bound the speed-ups if every
kernel is limited by memory and reaches the same bandwidth:

- Poplar, fp32: 4 read and 4 written to pack, 4 read for the norm, 16 read and 12 written to update:
  40. 16 bits: 2 read and 4 written to pack, and 2 more written at the end: 40 as well. (In training
  the sum over ranks computes the squares for the norm; here nothing is summed.)
- the usual torch, fp32: 8 each to weight, to unscale and to clip, 4 for the norm, 28 to step: 56,
  1.4 times as many. 16 bits: 6 more to widen and 6 to round: 68, 1.7 times.
- the best torch, fp32: 4 for the norm, 32 to step, because it writes the gradients back when given
  their scale: 36, 0.9 times. 16 bits: 6 more to widen and 6 to round: 48, 1.2 times.

So on a GPU, no packing implementation can reach 2.0 over the usual torch or, in fp32, 1.2 over the
best, unless torch's kernels stay that far below the bandwidth or their launches take longer than
they run. In 16 bits 1.2 is the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from verdict import CaseVerdict

from operators.row import Row
from operators.tasks import OURS

HEADLINE = "gpt-124m"


def verdicts(rows: Sequence[Row]) -> Iterator[CaseVerdict]:
    """All targets that apply to the rows."""
    for row in rows:
        if row.tensors != HEADLINE or row.way != OURS:
            continue
        case = ", ".join(filter(None, (row.operation, row.tensors, row.dtype, row.provider)))
        verdict = partial(CaseVerdict, case=case)
        usual, best_wanted = (2.0, 1.2) if row.device.startswith("cuda") else (1.3, 1.0)
        if row.operation == "pack":
            yield verdict(what="of the copy's bandwidth", value=row.of_copy, wanted=0.9)
        if row.operation == "chain":
            yield verdict(what="of its bandwidth bound", value=row.of_copy, wanted=0.9)
            yield verdict(what="over the usual torch", value=row.over_usual, wanted=usual)
            best = _best(rows, row)
            if best is not None:
                over = row.over_usual / best.over_usual
                yield verdict(what="over the best torch", value=over, wanted=best_wanted)


def _best(rows: Sequence[Row], ours: Row) -> Row | None:
    """The last row of the same case, measured with the same provider of Poplar's operators."""
    same = [row for row in rows if row.way == "best torch" and _case(row) == _case(ours)]
    return same[-1] if same else None


def _case(row: Row) -> tuple[str, ...]:
    return (row.operation, row.tensors, row.dtype, row.device, row.operators)

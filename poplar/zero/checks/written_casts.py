"""Notices parameters that are written between steps, again and again, in fewer bits than they had.

`compute_dtype` casts parameters that are not trained, too, and these have no fp32 masters. What a
moving average adds to them in a step is mostly less than half the distance to the next number of 16
bits, so it rounds away and the average stands still. A single write, such as a state dict that is
loaded, loses no more than the cast did.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from poplar.values.formatting import format_names
from poplar.zero.absent_parameter import AbsentValues, direct_access
from poplar.zero.checks.replica_check import bit_checksum

FIRST_STEPS = 3
"""Steps before which values are compared, too. What is written through `.data` shows only there."""


class _Seen(NamedTuple):
    """What a write into a parameter changes."""

    version: int
    place: int
    checksum: int | None
    """Of the values on this rank; None after the first steps, and for values that are not here."""

    def is_written_after(self, before: _Seen) -> bool:
        # Where parameters are sharded, the version is set back to that of the values.
        if self.version > before.version or self.place != before.place:
            return True
        known = self.checksum is not None and before.checksum is not None
        return known and self.checksum != before.checksum


class WrittenCasts:
    """The check of one model. It ends with its warning."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters`, by name, are not trained and have been cast to fewer bits."""
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._seen: list[_Seen] = []
        self._looks = 0
        self._written: set[int] = set()
        """Positions of those that were written after the last step."""

    def look(self) -> None:
        """Warn of parameters that were written after each of the last two steps. Local."""
        if not self._parameters:
            return
        before, self._seen = self._seen, self._look()
        pairs = enumerate(zip(before, self._seen, strict=False))  # the first time there is none
        written = {at for at, (old, new) in pairs if new.is_written_after(old)}
        again, self._written = sorted(written & self._written), written
        if again:
            names = format_names([self._names[position] for position in again])
            dtype = self._parameters[again[0]].dtype
            self._parameters = []
            warnings.warn(
                f"parameters that this optimizer does not train are written in step after step: "
                f"{names}. They were cast to {dtype} (compute_dtype) and have no fp32 masters, so "
                "small changes, such as those of a moving average, round away. Keep the average "
                "in an fp32 model outside of this one, or use compute_dtype=torch.float32, with "
                "torch.autocast in loss_fn",
                stacklevel=5,
            )

    def _look(self) -> list[_Seen]:
        self._looks += 1
        sums: list[int | None] = [None] * len(self._parameters)
        if self._looks <= FIRST_STEPS:
            here = [at for at, p in enumerate(self._parameters) if not isinstance(p, AbsentValues)]
            found = [bit_checksum(self._parameters[at].detach()) for at in here]
            read = torch.stack(found).tolist() if found else []  # one wait for the device
            for at, checksum in zip(here, read, strict=True):
                sums[at] = checksum
        with direct_access():
            seen = zip(self._parameters, sums, strict=True)
            return [_Seen(p._version, p.data_ptr(), checksum) for p, checksum in seen]

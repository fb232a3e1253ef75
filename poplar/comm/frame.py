"""What a rank sends in one exchange of the control channel: its call, a size, and the values.

All ranks send frames of the same size, whatever they call. So ranks that are in different calls
find out from the frames, and no rank takes a size for granted that another did not announce.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poplar.comm.copies import to_bytes

FRAME_SIZE = 512
"""In bytes. What fits into a frame needs no second exchange: a step's, up to 2,000 parameters."""
_HEADER = struct.Struct("<qq32s80s")
HEADER_SIZE = _HEADER.size
_ROOM = FRAME_SIZE - HEADER_SIZE
_SIZE_WIDTH = 8
"""The size comes first: it may differ between the ranks of one call."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The header and values of one rank, as bytes."""

    header: bytes
    data: Tensor
    """Header and values: 1-D, uint8."""

    @classmethod
    def of(cls, values: Tensor, *, form: str, index: int, what: str) -> Frame:
        """The frame of 1-D contiguous `values`.

        Args:
            values: on the CPU, of any dtype.
            form: their number and dtype, or what else must be equal on all ranks.
        """
        payload = values.view(torch.uint8)
        header = _HEADER.pack(payload.numel(), index, form.encode(), call_name(what).encode()[:80])
        data = torch.empty(HEADER_SIZE + payload.numel(), dtype=torch.uint8, device="cpu")
        data[:HEADER_SIZE] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        data[HEADER_SIZE:] = payload
        return cls(header, data)

    @property
    def values(self) -> Tensor:
        """The values, as bytes."""
        return self.data[HEADER_SIZE:]

    @property
    def first(self) -> Tensor:
        """`FRAME_SIZE` with the header, and with the values if they fit."""
        first = torch.zeros(FRAME_SIZE, dtype=torch.uint8, device="cpu")
        sent = self.data if fits(self.values.numel()) else self.data[:HEADER_SIZE]
        first[: sent.numel()] = sent
        return first

    def is_same_call(self, header: bytes) -> bool:
        """Whether a rank with this header is in the same call."""
        return header[_SIZE_WIDTH:] == self.header[_SIZE_WIDTH:]


@functools.lru_cache(maxsize=4096)
def call_name(what: str) -> str:
    """What ranks in one call have in common: `what` up to a quoted path, which may differ."""
    return what.partition("'")[0].rstrip("( ")


def fits(nbytes: int) -> bool:
    """Whether values of this size are sent within the frame."""
    return nbytes <= _ROOM


def header_of(data: Tensor) -> bytes:
    """The header at the beginning of a received frame."""
    return bytes(to_bytes(data[:HEADER_SIZE]))


def announced_bytes(header: bytes) -> int:
    """The size of the values that follow a header."""
    return int.from_bytes(header[:_SIZE_WIDTH], "little")


def describe_calls(names: Sequence[int], headers: Sequence[bytes]) -> str:
    """The error of ranks that are in different calls."""
    calls: dict[str, list[str]] = {}
    several = len({_HEADER.unpack(header)[1] for header in headers}) > 1
    for name, header in zip(names, headers, strict=True):
        _, index, form, what = _HEADER.unpack(header)
        text = f"{_text(what)!r} ({_text(form)})" + (f" of optimizer {index}" if several else "")
        calls.setdefault(text, []).append(str(name))
    found = "; ".join(f"rank(s) {', '.join(ranks)} in {call}" for call, ranks in calls.items())
    return (
        f"the ranks are in different calls: {found}. All ranks must make the same calls in the "
        "same order and equally often. Check loops whose length differs between ranks, and calls "
        "that only some ranks make. Build the optimizer again on all ranks, or restart from a "
        "checkpoint"
    )


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")

"""Times how fast this rank packs and adds gradients, as they are and with fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from poplar.comm import Codec, Encoded
from poplar.profiler.session import Session
from poplar.profiler.timing import seconds_of
from poplar.values.communication import BITS

MOST_ELEMENTS = 1 << 22
"""Elements that are packed and added, at most: more than caches hold."""
FEWEST_ELEMENTS = 1 << 16
_MOST_BYTES_EACH = 24
"""Bytes per element that this needs: a gradient, two copies and their sum."""
_REPEATS = 3


@dataclass(frozen=True)
class CodecSeconds:
    """The fields of `DeviceProfile` of the same names."""

    encode_seconds: tuple[float, ...] = ()
    decode_seconds: tuple[float, ...] = ()


def measure_codec(session: Session) -> CodecSeconds:
    """Time each precision; all ranks of a host should do so at the same time.

    Nothing is measured if there is one rank only.
    """
    if session.group.size == 1:
        return CodecSeconds()
    fitting = session.memory.spare(session.group.rank) / _MOST_BYTES_EACH
    numel = int(min(MOST_ELEMENTS, max(FEWEST_ELEMENTS, fitting))) // 64 * 64
    device = session.device
    gradient = torch.linspace(-1.0, 1.0, numel, device=device).to(session.compute_dtype)
    out = torch.empty(numel, dtype=torch.float32, device=device)

    def seconds(bits: int) -> tuple[float, float]:
        """Of an element that is packed, and of one that is added."""
        codec = Encoded(bits=bits) if bits else Codec(session.job.reduce_dtype)
        packed = torch.empty(codec.wire_numel(numel), dtype=codec.wire_dtype, device=device)
        pack = partial(codec.pack, packed, [gradient], [0], 1.0, False)
        add = partial(codec.reduce, out, [packed, packed], False)
        for run in (pack, add):
            run()  # once, so that kernels are loaded
        each = [seconds_of(run, device, _REPEATS) / numel for run in (pack, add)]
        return each[0], each[1] / 2

    encode, decode = zip(*map(seconds, BITS.values()), strict=True)
    return CodecSeconds(encode, decode)

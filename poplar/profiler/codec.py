"""Times how fast this rank packs and adds gradients, as they are and with fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from poplar.comm import Codec, Encoded
from poplar.profiler.session import Session
from poplar.profiler.timing import medians_in_turns
from poplar.values.communication import BITS

MOST_ELEMENTS = 1 << 22
"""Elements that are packed and added, at most: more than caches hold."""
FEWEST_ELEMENTS = 1 << 16
_MOST_BYTES_EACH = 24
"""Bytes per element that this needs: a gradient, two copies and their sum."""


def measure_codec(session: Session) -> dict[str, Any]:
    """Time each precision; all ranks of a host should do so at the same time.

    Returns:
        `DeviceProfile.encode_seconds` and `decode_seconds`; nothing if there is one rank only.
    """
    if session.group.size == 1:
        return {}
    fitting = session.memory.spare(session.group.rank) / _MOST_BYTES_EACH
    numel = int(min(MOST_ELEMENTS, max(FEWEST_ELEMENTS, fitting))) // 64 * 64
    device = session.device
    gradient = torch.linspace(-1.0, 1.0, numel, device=device).to(session.compute_dtype)
    out = torch.empty(numel, dtype=torch.float32, device=device)

    runs: list[Callable[[], object]] = []
    for bits in BITS.values():
        codec = Encoded(bits=bits) if bits else Codec(session.job.reduce_dtype)
        packed = torch.empty(codec.wire_numel(numel), dtype=codec.wire_dtype, device=device)
        pack = partial(codec.pack, packed, [gradient], [0], 1.0, False)
        add = partial(codec.reduce, out, [packed, packed], False)
        runs += [pack, add]
    seconds = medians_in_turns(runs, device)
    return {
        "encode_seconds": tuple(each / numel for each in seconds[::2]),
        "decode_seconds": tuple(each / (2 * numel) for each in seconds[1::2]),
    }

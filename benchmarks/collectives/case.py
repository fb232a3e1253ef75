"""Benchmark cases: one collective, of one size and dtype, with given shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from poplar.comm.shard_layout import ALIGNMENT, Layout

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Relative. Values are multiples of 1/8, so fp32 has only its own rounding."""
SAMPLES = 4096
"""Checked elements of a result, including the first and the last."""


@dataclass(frozen=True)
class Case:
    """One collective over `nbytes` (of the whole buffer) in `dtype`, divided by `shares`."""

    operation: str
    nbytes: int
    dtype: str
    shares: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return len(self.shares)

    @property
    def is_even(self) -> bool:
        return len(set(self.shares)) == 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @cached_property
    def layout(self) -> Layout:
        """The shard layout. Even shares are exactly equal, so that all providers support them."""
        step = ALIGNMENT * self.ranks
        numel = -(-self.nbytes // self.torch_dtype.itemsize // step) * step
        return Layout.from_shares(numel, self.shares)

    @property
    def least_bytes(self) -> int:
        """Bytes to read and write at least, if all inputs and results are in shared memory.

        A reduction reads all inputs and writes each sum once, or to every rank; a gather copies to
        each rank what it does not have.
        """
        whole = self.layout.numel * self.torch_dtype.itemsize
        copies = {
            "all_reduce": 2 * self.ranks,
            "reduce_scatter": self.ranks + 1,
            "all_gather": 2 * (self.ranks - 1),
        }
        return copies[self.operation] * whole

    def crossing_bytes(self, hosts: Sequence[Sequence[int]]) -> int:
        """The least bytes that the host with the most communication must send or receive.

        A host sends sums of slices that others own, and receives slices to gather; an all-reduce
        does both.
        """
        itemsize, numel = self.torch_dtype.itemsize, self.layout.numel
        foreign = [numel - sum(self.layout.size(rank) for rank in ranks) for ranks in hosts]
        own = [numel - elements for elements in foreign]
        most = max(max(foreign), max(own) * (len(hosts) - 1)) * itemsize
        return 2 * most if self.operation == "all_reduce" else most

    def input_of(self, rank: int) -> Tensor:
        """This rank's input: the whole buffer to reduce, or its own slice to gather."""
        low, high = self.layout.bounds(rank)
        if self.operation != "all_gather":
            low, high = 0, self.layout.numel
        return _values(torch.arange(low, high), rank).to(self.torch_dtype)

    def check(self, result: Tensor, rank: int) -> None:
        """Compare a sample of a rank's result with the sum in float64.

        Raises:
            ValueError: the result is wrong; says where.
        """
        low, high = self.layout.bounds(rank)
        if self.operation != "reduce_scatter":
            low, high = 0, self.layout.numel
        if result.numel() != high - low:
            raise ValueError(f"{self}: rank {rank} has {result.numel()} elements, not {high - low}")
        if high == low:
            return
        places = torch.randint(low, high, (SAMPLES,), generator=torch.Generator().manual_seed(rank))
        places[:2] = torch.tensor([low, high - 1])
        expected = self._expected(places)
        found = result[places - low].double()
        wrong = (found - expected).abs() > TOLERANCES[self.torch_dtype] * expected.abs().clamp(1.0)
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise ValueError(
                f"{self}: rank {rank} has {found[place].item()} at {int(places[place])}, "
                f"not {expected[place].item()}"
            )

    def _expected(self, places: Tensor) -> Tensor:
        if self.operation != "all_gather":
            return sum((_values(places, rank) for rank in range(self.ranks)), torch.zeros(()))
        expected = torch.empty(places.numel(), dtype=torch.float64)
        for rank in range(self.ranks):
            low, high = self.layout.bounds(rank)
            own = (places >= low) & (places < high)
            expected[own] = _values(places[own], rank)
        return expected

    def __str__(self) -> str:
        shares = "even" if self.is_even else "/".join(f"{100 * s:g}" for s in self.shares)
        return f"{self.operation} {size_of(self.nbytes)} {self.dtype} {self.ranks} ranks {shares}"


def size_of(nbytes: float) -> str:
    """Bytes as text, such as `64 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:g} {unit}"
        nbytes /= 1024
    return f"{nbytes:g} GiB"


def _values(places: Tensor, rank: int) -> Tensor:
    """Multiples of 1/8 between -16 and 16: every dtype represents them exactly."""
    return ((places * 7 + rank * 13) % 255 - 127).double() / 8

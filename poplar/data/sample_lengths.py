"""The lengths of a dataset's samples, and to which length a micro-batch of them is padded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from poplar.data.length_balance import checked_lengths, digest_of


class SampleLengths:
    """The distribution of the longest of `n` samples that are drawn at random."""

    def __init__(self, lengths: Iterable[float] | Tensor, quantile: float) -> None:
        """
        Args:
            lengths: of all samples of the dataset.
            quantile: of the longest samples of micro-batches, for `longest`.

        Raises:
            ValueError: lengths that are not numbers above 0; a quantile that is not below 1.
        """
        if not 0.0 < quantile < 1.0:
            raise ValueError(f"length_quantile must be above 0 and below 1, got {quantile}")
        self._sorted = checked_lengths(lengths).sort().values
        self._quantile = quantile
        self.typical = cache(self._typical)
        self.longest = cache(self._longest)

    def __str__(self) -> str:
        """What was measured, for the identity of a profile."""
        values = self._sorted
        return (
            f"{len(values)} samples of {float(values[0]):g} to {float(values[-1]):g}, mean "
            f"{float(values.mean()):g}, memory at quantile {self._quantile} ({digest_of(values)})"
        )

    def _typical(self, samples: int) -> int:
        """The expected longest of so many samples, rounded up."""
        count = len(self._sorted)
        # The longest is at most the k-th value with the probability (k / count) ** samples.
        at_most = (torch.arange(count + 1, dtype=torch.float64, device="cpu") / count) ** samples
        return math.ceil(float((self._sorted * at_most.diff()).sum()) - 1e-9)

    def _longest(self, samples: int) -> int:
        """A length that the longest of so many samples exceeds with `1 - quantile` at most."""
        count = len(self._sorted)
        at_least = self._quantile ** (1.0 / samples)
        place = min(count, math.ceil(at_least * count - 1e-9))
        return math.ceil(float(self._sorted[place - 1]))

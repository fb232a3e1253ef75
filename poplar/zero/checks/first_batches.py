"""Looks at the batches of the first steps: samples that two ranks share, lengths that change.

Each rank must get its own part of the global batch. Ranks that shuffle with different seeds train
on some samples twice and on others never; ranks without a sampler of their own may all get the same
samples. The plan counts samples, so ranks with longer ones than planned make the others wait. None
of it is visible in a loss.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from poplar.comm import Control
from poplar.data import pytree
from poplar.data.drawn_batches import last_drawn
from poplar.data.lengths import padded_length
from poplar.values.errors import agreed
from poplar.zero.agreement import exchange_results, run_on_all_ranks

LENGTH_STEPS = 16
"""Steps in which lengths are looked at."""
LENGTH_TOLERANCE = 0.15
"""The longest may be longer than the shortest by this fraction: the time of a pass grows at least
in proportion to the length where the model takes most of it."""


class FirstBatches:
    """The checks of one optimizer. Those of lengths read shapes only, on one rank."""

    def __init__(self, control: Control, *, looks: bool) -> None:
        """`looks`: whether this rank looks at lengths."""
        self._control = control
        self._compares = True
        self._length_steps = LENGTH_STEPS if looks else 0
        self._shortest, self._longest = 0, 0

    def skip(self) -> None:
        """Look at nothing."""
        self._compares, self._length_steps = False, 0

    def look_at_lengths(self, batch: Any) -> None:
        """Warn once if padded lengths differ much and the sampler does not divide by length."""
        if not self._length_steps or batch is None:
            return
        self._length_steps -= 1
        length = padded_length(batch)
        self._longest = max(self._longest, length)
        self._shortest = min(self._shortest or length, length or self._shortest)
        differs = self._longest - self._shortest > LENGTH_TOLERANCE * self._shortest
        drawn = last_drawn()
        if not differs or (drawn is not None and drawn.order().get("lengths")):
            return
        self._length_steps = 0
        warnings.warn(
            f"batches were padded to {self._shortest} to {self._longest} tokens (dim 1) in the "
            "first steps, but the plan counts samples, so ranks with longer samples make the "
            "others wait; pass lengths=, the length of each sample, to HeteroBatchSampler and to "
            "autotune, and collate with poplar.data.CollateMicroBatches (with PoplarTrainer: "
            "PoplarArguments(balance_lengths=True)), which changes no gradient",
            stacklevel=5,
        )

    def compare(self, batch: Any) -> None:
        """Compare this rank's batch (None: no samples) with others. Collective in the first step.

        It raises on all ranks if samplers of two ranks have different orders.
        """
        if not self._compares:
            return

        def describe() -> tuple[Mapping[str, Any], str]:
            drawn = None if batch is None else last_drawn()
            return {} if drawn is None else drawn.order(), _digest_of_first_sample(batch)

        received = exchange_results(self._control, describe, what="the first step")
        group = self._control.group
        drawn = [(rank, order) for rank, (order, _) in group.by_name(received).items() if order]
        for rank, order in drawn:
            first, expected = drawn[0]
            if order != expected:
                raise agreed(
                    ValueError(
                        f"the HeteroBatchSampler of rank {first} has {_text(expected)}, that of "
                        f"rank {rank} {_text(order)}, so their parts are not of the same global "
                        "batch; give all ranks the same dataset length, plan, seed, shuffle, "
                        "lengths and epoch"
                    )
                )
        digests = [digest for _, digest in received]
        equal = [rank for rank, own in enumerate(digests) if own and own in digests[:rank]]
        if equal:
            same = [group.names[rank] for rank in (digests.index(digests[equal[0]]), equal[0])]

            def warn() -> None:
                if group.rank == 0:
                    warnings.warn(
                        f"ranks {same[0]} and {same[1]} have the same first sample in their first "
                        "batch, but each rank must get its own part of the global batch: build the "
                        "loader with HeteroBatchSampler(len(dataset), plan)",
                        stacklevel=7,
                    )

            run_on_all_ranks(self._control, warn, doing="the first step")  # it may be an error
        self._compares = False  # not after an error, which a caller may handle


def _text(order: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in order.items() if value != "")


def _digest_of_first_sample(batch: Any) -> str:
    """A hash of the first row of each tensor; "" if all are constants, as artificial data are.

    Also "" if the batch is wrong, which the step reports.
    """
    digest, differs = hashlib.sha256(), False
    try:
        for tensor in pytree.tensors(batch):
            if tensor.dim() and len(tensor):
                sample: Tensor = tensor[0].detach().to("cpu").reshape(-1)
                differs |= bool((sample != sample[:1]).any())
                digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    except Exception:
        return ""
    return digest.hexdigest() if differs else ""

"""Checks that parameters which every rank updates by itself have the same bits on all ranks.

Now and then a checksum is computed on the device. It travels with the row that closes the next step
and is read a step later, so the check needs no collective and the host does not wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from poplar.comm import Communicator, Control
from poplar.system.storage import as_bytes, separate_elements
from poplar.values.errors import ReplicasDiffer, agreed
from poplar.zero.agreement import exchange_results
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.stages.strategy import Strategy
from poplar.zero.streams import HostCopies, Streams

FIRST_UPDATES = 2
"""Number of updates at the start that are checked: most mistakes show at once."""
PERIOD = 100
"""Number of updates from one check to the next. A check reads each parameter once, which is less
than an update moves, so checks cost less than 1 % of the updates."""

_LANES = 1 << 20
"""Most words that are added at a time, each to its own lane: 4 MiB, and 8 MiB of sums. More would
make these temporary sums larger; fewer would take a GPU longer to launch than to read."""
_LANES_ON_CPU = 1 << 15
"""So many of them at a time on the CPU, whose cache holds their sums. No plan contains them: larger
ones show in the memory of a rank without samples."""
_LEAST_ROWS = 11
"""At least so many words are added to each lane, so that the sums take less than a fifth of the
tensor's memory."""
_LANE = 0x9E3779B97F4A7C15
_ROW = 0x94D049BB133111EB
_TENSOR = 0xD1B54A32D192ED03
"""Odd constants, so that products modulo 2^64 lose no bits; these have no regular pattern."""


class ReplicaCheck:
    """The checks of one optimizer. Ranks call the methods equally often and in the same order."""

    def __init__(
        self, flats: Sequence[FlatParameter], control: Control, strategy: Strategy | None
    ) -> None:
        """If the strategy replicates the state, every rank updates all of these trained flat
        parameters, so masters must be equal. Else the values must be that are sent as differences:
        see [Note: differences] in `stages.strategy`. None: there are no flat parameters.
        """
        self._all = flats if control.group.size > 1 else ()
        self._replicates_state = strategy is not None and strategy.replicates_state
        self._streams = Streams() if strategy is None else strategy.streams
        self._control = control
        self._updates = 0
        self._next = 1
        """The next update to check."""
        self._own: tuple[int, Tensor] | None = None
        """An update and this rank's checksum after it, until it has been sent."""
        self._by_rank: tuple[int, HostCopies] | None = None
        """An update and all ranks' checksums, until they have been compared."""

    def record_update(self) -> None:
        """Compute the checksum after an update, if it is one to check."""
        self._updates += 1
        if self._updates >= self._next and (replicas := self._replicas()):
            self._own = self._updates, checksum([values for _, values in replicas])
            is_early = self._updates < FIRST_UPDATES
            self._next = self._updates + (1 if is_early else PERIOD - self._updates % PERIOD)

    @property
    def outgoing(self) -> Tensor | None:
        """A checksum to send: one int64 on the device. Call `receive` when all ranks have it."""
        return None if self._own is None else self._own[1]

    def receive(self, by_rank: Tensor) -> None:
        """Start to copy what the ranks have sent to the host, for `raise_if_different`."""
        if self._own is not None:
            group, what = self._control.group, "the checksums of the replicas"
            self._by_rank = self._own[0], HostCopies([by_rank], self._streams, group, what)
            self._own = None

    def raise_if_different(self) -> None:
        """Compare the checksums received in an earlier step. Collective if they differ."""
        if self._by_rank is None:
            return
        (update, copies), self._by_rank = self._by_rank, None
        received = copies.wait()[0].tolist()  # from before the step that the device runs now
        if len(set(received)) > 1:
            self._next = self._updates + 1
            self._raise_differences(update, received)

    def verify(self, prepare: Callable[[], None]) -> None:
        """Compare the present parameters, once each rank has run `prepare`. Collective."""

        def own() -> int:
            prepare()
            replicas = self._replicas()
            return int(checksum([values for _, values in replicas])) if replicas else 0

        received = exchange_results(self._control, own, what="comparing replicas")
        if len(set(received)) > 1:
            self._raise_differences(self._updates, received)

    def _raise_differences(self, update: int, received: Sequence[int]) -> None:
        """Find the parameters that differ and raise. Collective."""
        flats, values = zip(*self._replicas(), strict=True)
        different = differing_parameters(self._control, flats, values, "comparing replicas")
        first, sums = different[0] if different else ("none any more", received)
        others = f" and {len(different) - 1} more" if len(different) > 1 else ""
        ranks = [self._control.group.names[rank] for rank in _minority(sums)]
        raise agreed(
            ReplicasDiffer(
                f"the replicated parameters differ after update {update}: on rank(s) {ranks} "
                f"{first!r}{others} has other bits than on the other ranks. {self._cause()}"
            )
        )

    def _cause(self) -> str:
        changed = "a parameter was changed on some ranks only (in loss_fn, a hook or a callback)"
        if not self._replicates_state:
            return (
                "All ranks add the same compressed updates to these values, so the ranks now train "
                f"different models. Possible causes: {changed}, or a device is faulty. Load the "
                "last checkpoint"
            )
        return (
            "All ranks update all parameters, from the same gradient, so the ranks now train "
            f"different models. Possible causes: {changed}, the optimizer class is random or reads "
            "state of its process, or a device is faulty. Load the last checkpoint. If the "
            "optimizer is the cause, use stage 1, where one rank updates each element"
        )

    def _replicas(self) -> list[tuple[FlatParameter, Tensor]]:
        """Flat parameters with what must be equal on all ranks."""
        if self._replicates_state:
            return [(flat, flat.master) for flat in self._all]
        return [(flat, flat.values) for flat in self._all if flat.sends_differences]


def differing_parameters(
    control: Control, flats: Sequence[FlatParameter], values: Sequence[Tensor], what: str
) -> list[tuple[str, tuple[int, ...]]]:
    """The parameters whose bits differ between ranks, with their checksums by rank. Collective.

    `values` are those of all elements of each flat parameter, on every rank.
    """
    parts = [
        (name, tensor[slice(*flat.span(position))])
        for flat, tensor in zip(flats, values, strict=True)
        for position, name in enumerate(flat.names)
    ]
    own = [int(checksum([part])) for _, part in parts]
    by_rank = zip(*control.exchange_objects(own, what=what), strict=True)
    named = zip((name for name, _ in parts), by_rank, strict=True)
    return [(name, sums) for name, sums in named if len(set(sums)) > 1]


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """A checksum of the bits of tensors: one int64 on the first one's device, exact in any order.

    Each tensor has a multiple of 4 bytes. Every 32-bit word is multiplied by an odd factor of its
    own and added modulo 2^64, so each changed bit counts, and so do exchanged words. Words of 64
    bits would not do: two odd factors have an even difference, which can cancel the upper bits.
    """
    device = tensors[0].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        words = _word_sum(tensor.detach().view(torch.int32))
        total = torch.add(words.to(device), total, alpha=_signed(_TENSOR))
    return total


def _word_sum(words: Tensor) -> Tensor:
    """The sum of words times `_ROW ** row * _LANE ** lane`; the last row is row 0 of its lanes."""
    number = min(_LANES, 1 << max(1, words.numel() // _LEAST_ROWS).bit_length() - 1)
    width = min(number, _LANES_ON_CPU) if words.device.type == "cpu" else number
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in reversed(range(0, number, width)):
        lanes = torch.zeros(width, dtype=torch.int64, device=words.device)
        for begin in range(first, words.numel(), number):
            row = words[begin : begin + width]
            sums = lanes[: len(row)]
            torch.add(row, sums, alpha=_signed(_ROW), out=sums)
        while lanes.numel() > 1:  # without constants in device memory
            half = lanes.numel() // 2
            lanes = lanes[:half].add_(lanes[half:], alpha=_signed(pow(_LANE, half, 1 << 64)))
        total = torch.add(lanes[0], total, alpha=_signed(pow(_LANE, width, 1 << 64)))
    return total


def replicate(
    tensors: Mapping[str, Tensor],
    comm: Communicator,
    control: Control,
    *,
    doing: str,
    device: torch.device | None = None,
) -> list[str]:
    """Give all ranks the first rank's values of tensors, by name. Collective.

    Only tensors whose bits differ are sent: a model that all ranks have read from the same files
    costs no communication. They are sent from `device`; None: from where they are.

    Returns:
        The names of those that were sent.
    """
    sent = []
    own = [int(bit_checksum(tensor)) for tensor in tensors.values()]
    by_rank = control.exchange_objects(own, what=doing)
    for (name, tensor), sums in zip(tensors.items(), zip(*by_rank, strict=True), strict=True):
        if len(set(sums)) > 1:
            whole = tensor.detach().contiguous().to(device)
            comm.broadcast(whole, 0, what=f"the broadcast of {name}")
            if whole.data_ptr() != tensor.data_ptr():
                separate_elements(tensor)
                tensor.copy_(whole)
            sent.append(name)
    return sent


def bit_checksum(tensor: Tensor) -> Tensor:
    """As `checksum`, of one tensor of any size and dtype."""
    data = as_bytes(tensor.resolve_conj().contiguous())
    whole = data.numel() // 4 * 4
    rest = torch.nn.functional.pad(data[whole:], (0, whole + 4 - data.numel()))
    return checksum([data[:whole].clone() if data.data_ptr() % 4 else data[:whole], rest])


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - (1 << 64) if word >> 63 else word


def _minority(sums: Sequence[int]) -> list[int]:
    """Ranks whose checksum is not the most frequent one; not the one of rank 0 among equals."""
    usual = Counter(sums).most_common(1)[0][0]  # the first of equally frequent ones
    return [rank for rank, value in enumerate(sums) if value != usual]

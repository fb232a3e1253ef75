"""What a ZeRO stage has to say: where values, gradients and state live, and when they move.

The engine calls these methods in one order on every rank; a strategy never sees a stage number, and
reads like the paragraph that explains its stage.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from poplar import ops
from poplar.comm import Codec, Communicator, Pending
from poplar.comm.shard_layout import Layout
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.unit import Unit


class Strategy(ABC):
    """One ZeRO stage; all methods that talk to other ranks say `Collective`."""

    shards_parameters: ClassVar[bool]
    """Parameters have to be gathered before a unit runs."""
    reduces_every_pass: ClassVar[bool]
    """Gradients are reduced in each pass, not only in a rank's last one."""

    def __init__(self, comm: Communicator, reduce_dtype: torch.dtype) -> None:
        self.comm = comm
        self.codec = Codec(reduce_dtype)
        self.max_in_flight = 2
        """Reductions under way at once; each holds its bucket and what it receives."""
        self.waited = 0.0
        """Seconds this rank was held up by its peers since the step began."""
        self.persistent: frozenset[Unit] = frozenset()
        """Units that, once gathered in a step, stay until it is settled. Changed between steps, and
        on all ranks alike; says nothing where nothing is gathered."""
        self._pending: deque[Pending] = deque()
        self._allocated: set[FlatParameter] = set()

    def prepare(self, units: Sequence[Unit]) -> None:
        """These will be trained."""

    def layout_for(self, flat: FlatParameter, shares: Sequence[float]) -> Layout:
        """How `flat` is cut under `shares`."""
        return Layout.from_shares(flat.numel, shares)

    def state_layout(self, flat: FlatParameter, to: int) -> Layout:
        """Where optimizer state lies, one owner per element: rank `to` where all have it."""
        return flat.layout

    def initialize(self, flat: FlatParameter, shares: Sequence[float]) -> None:
        """Lay out `flat` and take its values over. Collective."""
        layout = self.layout_for(flat, shares)
        self._broadcast_values(flat, layout, owned=layout.bounds(self.comm.group.rank))

    def change_layout(self, flat: FlatParameter, new: Layout, master: Tensor | None) -> None:
        """Go on under another layout, with the moved master. Collective, between steps.

        Where every rank has all values, only the views of what it owns change.
        """
        low, high = flat.owned = new.bounds(self.comm.group.rank)
        flat.layout, flat.shard = new, flat.values[low:high]
        flat.master = flat.shard if master is None else master
        self.free_gradient(flat)

    @abstractmethod
    def _allocate_gradient(self, flat: FlatParameter) -> None:
        """Give `flat.gradient` memory, for this step."""

    def _ensure_gradient(self, flat: FlatParameter) -> None:
        """Before the first gradients of a step are written: have memory for them."""
        if flat not in self._allocated:
            self._allocate_gradient(flat)
            blocks = -(-flat.layout.size(self.comm.group.rank) // ops.ALIGNMENT)
            # What a transport forgets to fill is no number.
            flat.squares = torch.full((blocks,), math.nan, dtype=torch.float32, device=flat.device)
            self._allocated.add(flat)

    def free_gradient(self, flat: FlatParameter) -> None:
        """The step is over and its gradient is not needed: forwards run without it."""
        flat.gradient = flat.squares = torch.empty(0, device=flat.device)
        self._allocated.discard(flat)

    def accumulate(self, flat: FlatParameter, weight: float) -> None:
        """Add the parameters' gradients, times `weight`, to this rank's sums of the step.

        Only where not every pass reduces.
        """
        raise NotImplementedError(f"{type(self).__name__} reduces in every pass")

    @abstractmethod
    def reduce(self, flat: FlatParameter, weight: float) -> None:
        """Take the parameters' gradients, times `weight`, and start to reduce over ranks.

        Collective; a rank without gradients contributes zeros.
        """

    def wait_for_reductions(self, units: Sequence[Unit]) -> None:
        """Wait until the layout's slice of this rank holds the step's mean gradient. Collective."""
        self._drain(0)
        for unit in units:
            for flat in unit.trained:
                flat.mark_squares_valid()

    def finish_gradients(self, units: Sequence[Unit]) -> None:
        """Wait until all of `flat.gradient` does, and `.grad` where it shows it. After `settle`."""

    def begin_step(self) -> None:
        """Where ranks open a step together, nobody reads anything of the one before any more."""
        self.waited = 0.0
        self.comm.trim()

    def publish_update(self, units: Sequence[Unit]) -> None:
        """Bring the shards that the optimizer changed to where they are read. Collective."""
        pending = [
            self.comm.all_gather(flat.values, flat.layout, what=f"the new values of {unit.name}")
            for unit in units
            for flat in unit.trained
        ]
        for unshard in pending:
            self.wait(unshard)

    def wait_for_readers(self, flat: FlatParameter) -> None:
        """Before `flat.shard` changes: wait until no peer reads it any more."""

    def unshard(self, unit: Unit, *, in_step: bool) -> None:
        """Start to gather a unit's values. Collective.

        Args:
            in_step: in a training pass, so that a unit in `kept` stays.
        """

    def wait_for_unshard(self, unit: Unit) -> None:
        """Wait for the unit's values and point its parameters at them."""

    def reshard(self, unit: Unit) -> None:
        """Give the gathered values back, unless they stay."""

    def reshard_persistent(self) -> None:
        """Give back what has stayed since earlier passes, so that it is gathered when next needed.

        On all ranks at the same place in the order of collectives.
        """

    def scale_gradients(self, units: Sequence[Unit], factor: Tensor) -> bool:
        """Multiply the settled gradient where the user can see it; otherwise that is left to do."""
        return False

    def read_back_gradients(self, flat: FlatParameter) -> list[int]:
        """Take over what the user made of `.grad` since it was shown.

        Returns:
            Positions of the parameters whose `.grad` was set to None.
        """
        return []

    def store_values(self, flat: FlatParameter) -> None:
        """Take over values that the user wrote into the shown parameters."""
        self.wait_for_readers(flat)
        flat.shard.copy_(flat.values[flat.owned[0] : flat.owned[1]])

    def wait(self, pending: Pending) -> None:
        self.waited += pending.wait()

    def _limit_in_flight(self) -> None:
        """Before the next reduction takes memory: wait for the oldest if there are enough."""
        self._drain(self.max_in_flight - 1)

    def _drain(self, leave: int) -> None:
        while len(self._pending) > leave:
            self.wait(self._pending.popleft())

    def _broadcast_values(
        self, flat: FlatParameter, layout: Layout, owned: tuple[int, int]
    ) -> None:
        """Broadcast the first rank's values and make the parameters views of them."""
        exact, values = flat.initial_values()
        self.comm.broadcast(exact, 0, what=f"the broadcast of {flat.name}'s initial values")
        if values is not exact:
            values.copy_(exact)
        low, high = flat.owned = owned
        flat.layout, flat.values, flat.shard = layout, values, values[low:high]
        keeps_master = flat.trained and values is not exact
        flat.master = exact[low:high].clone() if keeps_master else flat.shard
        flat.attach_parameters()

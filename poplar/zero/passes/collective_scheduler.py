"""Opens passes, and keeps the orders of collectives that the ranks have agreed on."""

from __future__ import annotations

from collections.abc import Sequence

from poplar.comm import Control
from poplar.values.errors import OutOfOrder
from poplar.zero.passes.collective_order import CollectiveOrder, Slot, agreed_order
from poplar.zero.passes.collective_pass import CollectivePass, Mode, PassSettings
from poplar.zero.passes.recording_pass import FollowingPass, LeadingPass, RecordingPass
from poplar.zero.passes.replay_pass import ReplayPass
from poplar.zero.stages.strategy import Strategy
from poplar.zero.unit import Unit


class CollectiveScheduler:
    """The passes of one engine, of which one at a time is open."""

    def __init__(self, units: Sequence[Unit], strategy: Strategy, control: Control) -> None:
        self._units = units
        self._strategy = strategy
        self._control = control
        self._recorded_orders: dict[tuple[Mode, bool], tuple[Slot, ...]] = {}
        self._orders: dict[tuple[Mode, bool, frozenset[Unit]], CollectiveOrder] = {}
        self._open: CollectivePass | None = None

    @property
    def active(self) -> bool:
        """Whether a pass is open."""
        return self._open is not None

    @property
    def current(self) -> CollectivePass:
        """The open pass.

        Raises:
            OutOfOrder: none is open.
        """
        if self._open is None:
            raise OutOfOrder(
                f"rank {self._control.group.rank}: a backward reached units of a forward whose "
                "pass has ended; run one backward after each forward, before the next forward"
            )
        return self._open

    def has_order(self, mode: Mode, reduces: bool) -> bool:
        """Whether such passes can run without a leader: the order is recorded, or not needed."""
        has_slots = self._strategy.shards_parameters or reduces
        return (mode, reduces) in self._recorded_orders or not has_slots

    def begin(self, settings: PassSettings, leader: int) -> None:
        """Open a pass. Collective if the pass has slots.

        Args:
            settings: what kind of pass it is.
            leader: the rank that broadcasts the order while none has been recorded.
        """
        parts = self._units, self._strategy, self._control, settings
        if self.has_order(settings.mode, settings.reduces):
            self._open = ReplayPass(*parts, self._order(settings.mode, settings.reduces))
        elif leader == self._control.group.rank:
            self._open = LeadingPass(*parts)
        else:
            self._open = FollowingPass(*parts, leader)

    def finish(self, *, failed: bool = False) -> None:
        """Finish the open pass and keep the order that it has recorded. Collective."""
        own = self.current
        own.finish(failed=failed)
        if isinstance(own, RecordingPass) and own.order is not None:
            self._recorded_orders[own.mode, own.reduces] = own.order
        self._open = None

    def drop(self) -> None:
        """Close the open pass, if there is one, without finishing it."""
        self._open = None

    def _order(self, mode: Mode, reduces: bool) -> CollectiveOrder:
        """The order for the persistent units of now; empty for passes without slots."""
        recorded = self._recorded_orders.get((mode, reduces))
        if recorded is None:
            return CollectiveOrder((), ())
        staying = self._strategy.persistent if mode is Mode.TRAIN else frozenset()
        if (mode, reduces, staying) not in self._orders:
            sizes = [0 if u.resident or u in staying else u.unsharded_bytes for u in self._units]
            self._orders[mode, reduces, staying] = agreed_order(recorded, sizes)
        return self._orders[mode, reduces, staying]

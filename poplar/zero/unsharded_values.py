"""Which parameters are unsharded outside of passes, and may be read or written there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from poplar.comm import Control
from poplar.values.errors import agreed
from poplar.zero.agreement import exchange_results, run_on_all_ranks
from poplar.zero.flat_parameter import adopt_data
from poplar.zero.passes.collective_scheduler import CollectiveScheduler
from poplar.zero.stages.strategy import Strategy
from poplar.zero.unit import Unit


class UnshardedValues:
    """The values of a model's parameters on this rank, between passes."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        strategy: Strategy,
        scheduler: CollectiveScheduler,
        control: Control,
    ) -> None:
        self._model, self._units, self._strategy = model, units, strategy
        self._scheduler, self._control = scheduler, control
        self.sharded = frozenset(strategy.sharded(units))
        """The units that must be unsharded before they run."""
        self.present: set[Unit] = set()
        """The units of which this rank has all values, because of `unsharded`."""
        self._writable: set[Unit] = set()
        """Units in the contexts of `unsharded`."""
        self._naming = False
        self._shows_masters = False
        self._unit_of = {id(p): unit for unit in units for b in unit.buffers for p in b.parameters}

    def check_may_unshard(self) -> None:
        """Raise where parameters cannot be unsharded for the user: in a pass, or beside masters."""
        if self._shows_masters:
            raise RuntimeError(
                "full_parameters() inside full_parameters(masters=True); leave that context first"
            )
        if self._scheduler.active:
            raise RuntimeError(
                f"rank {self._control.group.name}: full_parameters() inside a pass; end the "
                "backward first. After a forward without a backward, call zero_grad(); run "
                "forwards that need none under torch.no_grad()"
            )

    @contextmanager
    def unsharded(self, *, writeback: bool, units: Sequence[Unit] | None = None) -> Iterator[None]:
        """A context in which units are unsharded, by default all. Collective at both ends."""
        self.check_may_unshard()
        wanted = self._units if units is None else units
        added = [unit for unit in wanted if unit not in self.present]  # others: outer contexts
        writable = [u for u in wanted if u not in self._writable] if writeback else []
        if self.sharded:
            self._allocate_lasting(added)
        for unit in added:
            self._strategy.unshard(unit, in_step=False, lasting=True)
        for unit in added:
            self._strategy.wait_for_unshard(unit)
        self.present.update(added)
        self._writable.update(writable)
        try:
            yield
        finally:
            # Of outer contexts, too: the data of their parameters may be memory of `wanted`.
            replaceable = self.sharded & self._writable if writeback else frozenset()
            self.present.difference_update(added)
            self._writable.difference_update(writable)
            try:
                flats = (flat for unit in replaceable for flat in unit.flats)
                adopt_data([(flat, position) for flat in flats for position in flat.replaced()])
                if writeback:
                    for flat in (flat for unit in wanted for flat in unit.flats):
                        self._strategy.store_values(flat)
            finally:
                for unit in added:
                    self._strategy.reshard(unit)

    @contextmanager
    def showing_masters(self) -> Iterator[None]:
        """A context in which parameters have other data. It has no `unsharded` inside."""
        self._shows_masters = True
        try:
            yield
        finally:
            self._shows_masters = False

    def _allocate_lasting(self, units: Sequence[Unit]) -> None:
        """Allocate the values of units outside of passes, on all ranks or on none. Collective."""

        def allocate() -> None:
            # Values written there must reach later passes only through the shards.
            self._strategy.reshard_persistent()
            for unit in units:
                self._strategy.allocate_lasting(unit)

        try:
            run_on_all_ranks(self._control, allocate, doing="unsharding the parameters")
        except BaseException:
            for unit in units:
                self._strategy.reshard(unit)
            raise

    def agreed_units(self, modules: Sequence[str | nn.Module] | None) -> Sequence[Unit]:
        """The units with parameters of these modules; None: all units. Collective."""

        def names() -> list[str] | None:
            self.check_may_unshard()
            return None if modules is None else [unit.name for unit in self._units_of(modules)]

        by_rank = exchange_results(self._control, names, what="full_parameters()")
        if any(names != by_rank[0] for names in by_rank):
            raise agreed(
                ValueError(
                    f"the ranks passed different modules to full_parameters(): their units are "
                    f"{self._control.group.by_name(by_rank)} by rank; pass the same modules"
                )
            )
        return self._units if modules is None else self._units_of(modules)

    def _units_of(self, modules: Sequence[str | nn.Module]) -> tuple[Unit, ...]:
        """The units that have parameters of these modules, given by themselves or by name."""
        names = dict(self._model.named_modules(remove_duplicate=False))
        found: set[Unit] = set()
        for module in modules:
            chosen = names.get(module) if isinstance(module, str) else module
            if chosen is None or not any(chosen is known for known in names.values()):
                raise ValueError(
                    f"modules: {module!r} is not in the model; give its modules, or their names as "
                    "named_modules() lists them"
                )
            tensors = (*chosen.parameters(), *chosen.buffers())
            units = (self._unit_of.get(id(tensor)) for tensor in tensors)
            found.update(unit for unit in units if unit is not None)
        return tuple(unit for unit in self._units if unit in found)

    @contextmanager
    def naming_parameters(self) -> Iterator[None]:
        """A context in which `state_dict` may be called for its names while values are sharded."""
        self._naming = True
        try:
            yield
        finally:
            self._naming = False

    @property
    def are_readable(self) -> bool:
        """Whether every parameter is unsharded on this rank now."""
        return self.present >= self.sharded

    def is_sharded(self, unit: Unit) -> bool:
        """Whether this rank has only its share of a unit's values now."""
        return unit in self.sharded and unit not in self.present

    @property
    def has_unsharded(self) -> bool:
        """Whether parameters have other data than in passes, because of `unsharded`."""
        return self._shows_masters or not self.present.isdisjoint(self.sharded)

    def may_read(self, module: nn.Module) -> bool:
        """Whether a module's own parameters are unsharded, or only their names matter."""
        return self._naming or self._are_in(module, self.present)

    def may_write(self, module: nn.Module) -> bool:
        """Whether values written into a module's own parameters now take effect."""
        return self._are_in(module, self._writable)

    def _are_in(self, module: nn.Module, units: set[Unit]) -> bool:
        tensors = (*module._parameters.values(), *module._buffers.values())
        own = (self._unit_of.get(id(tensor)) for tensor in tensors)
        apart = self._units if self._shows_masters else self.sharded
        return all(unit not in apart or unit in units for unit in own)

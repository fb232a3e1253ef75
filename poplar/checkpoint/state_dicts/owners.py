"""`Owners`: the ranks that have the elements of one parameter, from which they are gathered."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from poplar.comm import Control
from poplar.comm.shard_layout import Layout
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter


class Owners:
    """How the elements of a parameter, and its state, are divided among the ranks.

    Args:
        engine: of the parameter; a state dict does not keep it alive.
        flat: the flat parameter.
        position: of the parameter in it.
    """

    def __init__(self, engine: Engine, flat: FlatParameter, position: int) -> None:
        self._engine = weakref.ref(engine)
        self._name, offset = flat.names[position], flat.offsets[position]
        numel = flat.parameters[position].numel()
        self._layout = Layout(tuple(min(max(o - offset, 0), numel) for o in flat.layout.offsets))
        self._device = flat.device

    @classmethod
    def of(cls, engine: Engine, flat: FlatParameter, position: int) -> Owners | None:
        """The owners of a parameter; None if it is local, so that each rank has all of its own."""
        return None if flat.is_local else cls(engine, flat, position)

    @property
    def control(self) -> Control:
        """The channel for small values of the ranks."""
        return self._live_engine.control

    @property
    def _live_engine(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise RuntimeError(
                f"the optimizer of {self._name!r} does not exist any more, so the ranks cannot "
                "gather its elements; call full_tensor() while it does"
            )
        return engine

    def gather(self, local: Tensor) -> Tensor:
        """All elements, 1-D, on the device of `local`. Collective.

        Args:
            local: those that this rank had when the object was made.

        Raises:
            RuntimeError: in the middle of a step, or the optimizer does not exist any more.
        """
        engine = self._live_engine
        if engine.scheduler.active:
            raise RuntimeError("full_tensor() inside a pass; end the backward first")
        own = local.to(self._device)
        whole = torch.empty(self._layout.numel, dtype=own.dtype, device=self._device)
        what = f"gathering {self._name}"
        engine.comm.all_gather(whole, self._layout, what=what, own=own).wait()
        return whole.to(local.device)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Owners:
        return self  # it never changes

"""Notices, in the first steps, state that forwards write: every rank writes its own.

Buffers of the model, and parameters where every rank has all of them, are equal on all ranks when
the optimizer is built. What a forward writes into them from its samples, or once per pass, differs
afterwards: data-dependent initialization, running statistics, codebooks and frozen teachers by
moving average, the vectors of `spectral_norm`. One device would have seen the whole batch. Changes
that are equal on all ranks, such as masks, caches and counters, are no matter.

Where parameters are sharded, what a forward writes into them is lost, so any change counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from poplar.comm import Control
from poplar.values.errors import equal_on_all_ranks
from poplar.values.formatting import format_names
from poplar.zero.checks.replica_check import checksum, differing_parameters
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.opaque_parameter import is_opaque
from poplar.zero.stages.strategy import Strategy

FIRST_STEPS = 2
_WHAT = "state that forwards write"
_PROJECTIONS = 16
"""Sums with random signs that stand for a change: the norm of their difference is, within a factor
of two, that of the changes."""
_PROBED = 4096
"""Elements of a frozen parameter that are compared, at least a half of them: a frozen base may have
many GiB, of which a forward mostly writes none or all."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Relative difference of two changes that unlike devices explain; others round more."""
_ROUGH = 5e-2

Sketch = tuple[float, ...]


class ForwardStateCheck:
    """Compares the ranks' state in the first steps of one optimizer."""

    def __init__(
        self,
        model: nn.Module,
        control: Control,
        *,
        allowed: bool,
        flats: Sequence[FlatParameter] = (),
        strategy: Strategy | None = None,
    ) -> None:
        """
        Args:
            model: whose buffers and frozen parameters are compared.
            allowed: ranks may have state of their own; it must still not be lost.
            flats: parameters that this engine has, which are compared too.
            strategy: has their values; None: another engine has the parameters.
        """
        self._model, self._flats = model, [flat for flat in flats if not flat.is_local]
        self._managed = {id(parameter) for flat in flats for parameter in flat.parameters}
        self._strategy, self._control = strategy, control
        self._compares = not allowed and control.group.size > 1
        self._shards = strategy is not None and strategy.shards_parameters
        self._steps = FIRST_STEPS if self._compares or self._shards else 0
        self._before = self._on_host() if self._compares else {}
        if strategy is not None:
            strategy.note_writes(self._steps > 0)

    def skip(self) -> None:
        """Compare nothing."""
        self._steps, self._before = 0, {}
        if self._strategy is not None:
            self._strategy.note_writes(False)

    def look(self) -> None:
        """Compare the state after the passes of a step. Collective in the first steps.

        It raises on all ranks if the state differs, or if what a forward has written is lost.
        """
        if not self._steps:
            return
        lost = [] if self._strategy is None else self._strategy.take_noted_writes()
        now = self._on_host() if self._compares else {}
        changes = {name: _change(self._before.get(name), value) for name, value in now.items()}
        mine = (lost, {name: change for name, change in changes.items() if change}, self._sums())
        received = self._control.exchange_objects(mine, what=_WHAT)
        with equal_on_all_ranks():
            _raise_if_lost(sorted({name for names, _, _ in received for name in names}))
            sketches = [own for _, own, _ in received]
            for name in sorted({name for own in sketches for name in own}):
                tolerance = _TOLERANCE.get(now[name].dtype, _ROUGH) if name in now else _ROUGH
                by_rank = [own.get(name, (0.0,) * _PROJECTIONS) for own in sketches]
                equal = [not _differ(own, by_rank[0], tolerance) for own in by_rank]
                self._raise_if_different(name, equal)
            if any(sums != received[0][2] for _, _, sums in received):
                values = [flat.values for flat in self._flats]
                for name, sums in differing_parameters(self._control, self._flats, values, _WHAT):
                    equal = [own == sums[0] for own in sums]
                    self._raise_if_different(f"parameter {name!r}", equal)
        self._steps, self._before = self._steps - 1, now
        if not self._steps:
            self.skip()

    def _raise_if_different(self, what: str, is_equal: Sequence[bool]) -> None:
        """Raise if some ranks have not written the values of the first one."""
        group = self._control.group
        ranks = [rank for rank, equal in group.by_name(is_equal).items() if not equal]
        if ranks:
            raise ValueError(
                f"{what} differs after the forwards of this step: rank(s) {ranks} wrote other "
                f"values than rank {group.names[0]}, from their own samples or in another number "
                "of passes (data-dependent initialization, running statistics, codebooks or "
                "teachers by moving average, spectral_norm, Embedding(max_norm=...)). One device "
                "would have seen the whole batch. No rank applied the step, but the state is "
                "changed. Initialize such state before the optimizer is built, with the same "
                "samples on all ranks; freeze its module with .eval(); or write it between steps "
                "from values that are equal on all ranks, such as parameters or averages by "
                "torch.distributed.all_reduce. If it may differ, or your code averages it, pass "
                "allow_forward_state=True"
            )

    def _sums(self) -> list[int]:
        """A checksum of each flat parameter whose values this rank has.

        In the first step only: later differences may come from an update.
        """
        is_first = self._steps == FIRST_STEPS
        if not self._compares or not is_first or self._shards or self._strategy is None:
            return []
        return [int(checksum([flat.values])) for flat in self._flats]

    def _on_host(self) -> dict[str, Tensor]:
        """Buffers, and some elements of each frozen parameter that is in no flat parameter.

        Of buffers, the floating-point ones in the state dict: others are caches and counters. Of
        parameters, none of [Note: opaque tensors]: only their own module knows their elements.
        """
        buffers = {
            f"buffer {(f'{prefix}.{name}' if prefix else name)!r}": buffer.detach().to(
                "cpu", copy=True
            )
            for prefix, module in self._model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
            and name not in module._non_persistent_buffers_set
            and buffer.is_floating_point()
            and not buffer.is_meta
        }
        frozen = {
            f"parameter {name!r}": _probe(parameter).to("cpu", copy=True)
            for name, parameter in self._model.named_parameters()
            if id(parameter) not in self._managed
            and not (parameter.requires_grad or parameter.is_meta or is_opaque(parameter))
        }
        return buffers | frozen


def _raise_if_lost(names: Sequence[str]) -> None:
    if names:
        raise ValueError(
            f"the forward wrote into {format_names(names)}, which is lost at stage 3, where a "
            "forward has a copy of the parameters. Write them between steps in `with "
            "optimizer.full_parameters(writeback=True):`, initialize them before the optimizer "
            "is built, or use stages 0 to 2. No rank applied the step"
        )


def _probe(parameter: Tensor) -> Tensor:
    return parameter.detach().flatten()[:: parameter.numel() // _PROBED + 1]


def _change(before: Tensor | None, now: Tensor) -> Sketch | None:
    """Sums of a change with random signs; None if it may differ between ranks anyway."""
    if before is None or before.shape != now.shape:
        return None  # a cache that the forward has made or enlarged
    change = now.double() - before.double()
    if not bool(change.any()) or (now.numel() == 1 and float(change) == round(float(change))):
        return None  # a counter
    generator, flat = torch.Generator("cpu").manual_seed(0), change.flatten()

    def projection() -> float:
        bits = torch.randint(2, flat.shape, generator=generator, dtype=torch.int8, device="cpu")
        return float(flat @ (bits.double() * 2.0 - 1.0))

    return tuple(projection() for _ in range(_PROJECTIONS))


def _differ(one: Sketch, other: Sketch, tolerance: float) -> bool:
    def norm(values: Any) -> float:
        return float(torch.tensor(list(values), dtype=torch.float64, device="cpu").norm())

    difference = norm(a - b for a, b in zip(one, other, strict=True))
    return difference > tolerance * max(norm(one), norm(other))

"""Notices, in the first steps, state that forwards write: every rank writes its own.

Buffers of the model, and parameters where every rank has all of them, are equal on all ranks when
the optimizer is built. What a forward writes into them from its samples, or once per pass, differs
afterwards: data-dependent initialization, running statistics, counts by token or class, codebooks
and frozen teachers by moving average, the vectors of `spectral_norm`. One device would have seen
the whole batch. Changes that are equal on all ranks, such as masks, caches and counters, are
accepted. A program may write counts of its own between steps: buffers that are not floating-point
are read again when a step opens.

Where parameters are sharded, what a forward writes into them is lost, so any change counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from poplar.comm import Control
from poplar.system.storage import as_bytes, has_plain_elements
from poplar.values.errors import equal_on_all_ranks
from poplar.values.formatting import format_names
from poplar.zero.agreement import exchange_results
from poplar.zero.checks.replica_check import bit_checksum, checksum, differing_parameters
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.opaque_parameter import component_tensors, is_opaque
from poplar.zero.preserved_state import persistent_buffers
from poplar.zero.stages.strategy import Strategy

FIRST_STEPS = 2
_WHAT = "state that forwards write"
_OF_TRAINED = (
    "or write it between steps in `with optimizer.full_parameters(writeback=True):`, from values "
    "that are equal on all ranks, such as parameters or averages by torch.distributed.all_reduce"
)
"""What to do about trained parameters; a rank cannot have its own."""
_OF_OTHERS = (
    "freeze its module with .eval(); or write it between steps from values that are equal on all "
    "ranks, such as parameters or averages by torch.distributed.all_reduce. If it may differ, or "
    "your code averages it, pass allow_forward_state=True"
)
_PROBED = 4096
"""Elements of a frozen parameter that are compared, at least a half of them: a frozen base may have
many GiB, of which a forward mostly writes none or all."""
_SMALL = 8 * _PROBED
"""Bytes of tensors that are read together and compared on the host: in many models, all of them."""
_LANES = 61
"""Sums of a tensor; a prime, so that no column of a matrix is in one of them alone."""
_ROWS = 1 << 12
"""Rows of so many elements that are converted at a time: 2 MB in fp64."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Relative difference of two changes that unlike devices explain; others round more."""
_ROUGH = 5e-2

Sums = tuple[float, ...] | tuple[int, ...]


class _Digest(NamedTuple):
    """What is kept of a tensor to find out how a forward changes it."""

    shape: torch.Size
    bits: int
    """A checksum of all bits; a hash for small tensors."""
    sums: Tensor
    """By lane, the elements times random factors, which are 1 in the first row. A change has the
    difference of two as its sums. Of floating-point numbers, their norm is, within a factor of two,
    that of the elements. Equal sums of integers are of equal integers."""
    tolerance: float
    """Relative difference of the sums of two changes that rounding explains."""

    @classmethod
    def of(cls, tensor: Tensor, before: _Digest | None) -> _Digest:
        """Of a tensor now, on the host if it is small; `before` itself if it has not changed."""
        is_small = tensor.nbytes <= _SMALL
        bits = hash(as_bytes(tensor).numpy().tobytes()) if is_small else int(bit_checksum(tensor))
        if before is not None and (before.shape, before.bits) == (tensor.shape, bits):
            return before
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        is_rounded = values.is_floating_point()
        tolerance = _TOLERANCE.get(values.dtype, _ROUGH) if is_rounded else 0.0
        return cls(tensor.shape, bits, _lane_sums(values), tolerance)

    def change(self, before: _Digest | None) -> tuple[float, Sums] | None:
        """Tolerance and sums of a change; None if there is none, or if ranks may differ in it."""
        if self is before or before is None or self.shape != before.shape:
            return None  # else a cache that the forward has made or enlarged
        sums = (self.sums - before.sums).tolist()
        if self.shape.numel() == 1 and sum(sums) % 1 == 0:
            return None  # a counter
        return self.tolerance, tuple(sums)


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
        self._before: dict[str, _Digest] = {}
        self._before = self._digests(dict(self._compared())) if self._compares else {}
        if strategy is not None:
            strategy.note_writes(self._steps > 0)

    def skip(self) -> None:
        """Compare nothing."""
        self._steps, self._before = 0, {}
        if self._strategy is not None:
            self._strategy.note_writes(False)

    def open(self) -> None:
        """Note what the program has written since the last step; before its forwards. Local.

        A loop of the user without `micro_batches` opens a step in its first backward.
        """
        if self._before:
            counts = {n: each for n, each in self._buffers() if not each.is_floating_point()}
            self._before |= self._digests(counts)

    def look(self) -> None:
        """Compare the state after the passes of a step. Collective in the first steps.

        It raises on all ranks if the state differs, or if what a forward has written is lost.
        """
        if not self._steps:
            return
        now: dict[str, _Digest] = {}

        def own() -> tuple[list[str], dict[str, tuple[float, Sums]], list[int]]:
            lost = [] if self._strategy is None else self._strategy.take_noted_writes()
            now.update(self._digests(dict(self._compared())) if self._compares else {})
            changes = {name: each.change(self._before.get(name)) for name, each in now.items()}
            return lost, {name: each for name, each in changes.items() if each}, self._sums()

        received = exchange_results(self._control, own, what=_WHAT)
        with equal_on_all_ranks():
            _raise_if_lost(sorted({name for names, _, _ in received for name in names}))
            written = [own for _, own, _ in received]
            for name in sorted({name for own in written for name in own}):
                tolerance = max(own[name][0] for own in written if name in own)
                by_rank = [own[name][1] if name in own else (0,) * _LANES for own in written]
                equal = [not _differ(own, by_rank[0], tolerance) for own in by_rank]
                self._raise_if_different(name, equal, _OF_OTHERS)
            if any(sums != received[0][2] for _, _, sums in received):
                values = [flat.values for flat in self._flats]
                for name, sums in differing_parameters(self._control, self._flats, values, _WHAT):
                    equal = [own == sums[0] for own in sums]
                    self._raise_if_different(f"parameter {name!r}", equal, _OF_TRAINED)
        self._steps, self._before = self._steps - 1, now
        if not self._steps:
            self.skip()

    def _raise_if_different(self, what: str, is_equal: Sequence[bool], advice: str) -> None:
        """Raise if some ranks have not written the values of the first one."""
        group = self._control.group
        ranks = [rank for rank, equal in group.by_name(is_equal).items() if not equal]
        if ranks:
            raise ValueError(
                f"{what} differs after the forwards of this step: rank(s) {ranks} wrote other "
                f"values than rank {group.names[0]}, from their own samples or in another number "
                "of passes (data-dependent initialization, running statistics, counts, codebooks "
                "or teachers by moving average, spectral_norm, embedding(max_norm=...)). One "
                "device would have seen the whole batch. No rank applied the step, but the state "
                "is changed. Initialize such state before the optimizer is built, with the same "
                f"samples on all ranks; {advice}"
            )

    def _sums(self) -> list[int]:
        """A checksum of each flat parameter whose values this rank has.

        In the first step only: later differences may come from an update.
        """
        is_first = self._steps == FIRST_STEPS
        if not self._compares or not is_first or self._shards or self._strategy is None:
            return []
        return [int(checksum([flat.values])) for flat in self._flats]

    def _digests(self, tensors: dict[str, Tensor]) -> dict[str, _Digest]:
        small = {name: each for name, each in tensors.items() if each.nbytes <= _SMALL}
        near = tensors | dict(zip(small, _on_host([*small.values()]), strict=True))
        return {name: _Digest.of(each, self._before.get(name)) for name, each in near.items()}

    def _compared(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers, and some elements of each frozen parameter that is in no flat parameter.

        Of parameters, none of [Note: opaque tensors]: only their own module knows their elements.
        """
        yield from self._buffers()
        for name, parameter in self._model.named_parameters():
            is_left_out = parameter.requires_grad or parameter.is_meta or is_opaque(parameter)
            if id(parameter) not in self._managed and not is_left_out:
                yield f"parameter {name!r}", _probe(parameter)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers in the state dict: others are caches."""
        for name, buffer in persistent_buffers(self._model).items():
            for number, part in enumerate(filter(has_plain_elements, component_tensors(buffer))):
                yield f"buffer {name!r}" + (f" ({number})" if number else ""), part.detach()


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


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, which cost one read of each device together."""
    pieces = defaultdict[torch.device, list[Tensor]](list)
    for tensor in tensors:
        pieces[tensor.device].append(as_bytes(tensor.contiguous()))
    parts = {
        device: iter(torch.cat(own).cpu().split([len(piece) for piece in own]))
        for device, own in pieces.items()
    }
    return [next(parts[t.device]).clone().view(t.dtype).view(t.shape) for t in tensors]


def _lane_sums(values: Tensor) -> Tensor:
    """As `_Digest.sums`, on the host."""
    dtype = torch.float64 if values.is_floating_point() else torch.int64
    generator = torch.Generator("cpu").manual_seed(0)
    total = torch.zeros(_LANES, dtype=dtype, device=values.device)
    for number, piece in enumerate(values.reshape(-1).split(_ROWS * _LANES)):
        rows = pad(piece.to(dtype), (0, -len(piece) % _LANES)).view(-1, _LANES)
        factors = torch.empty(rows.shape, dtype=torch.int64, device="cpu")
        factors.random_(-(1 << 63), None, generator=generator)  # all bits, for integers
        if values.is_floating_point():  # from 0.5 to 1.5, with either sign
            factors = factors.double() / 2.0**63
            factors += factors.sign() / 2
        if number == 0:
            factors[:1] = 1
        total += (rows * factors.to(values.device)).sum(0)
    return total.cpu()


def _differ(one: Sums, other: Sums, tolerance: float) -> bool:
    both = zip(one, other, strict=True)
    pairs = [(a, b) for a, b in both if math.isfinite(a) or math.isfinite(b)]
    difference = math.hypot(*(a - b for a, b in pairs))
    largest = max((math.hypot(*own) for own in zip(*pairs, strict=True)), default=0.0)
    return not difference <= tolerance * largest

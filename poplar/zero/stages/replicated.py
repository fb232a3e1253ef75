"""ZeRO-0: every rank has the full training state; gradients are reduced once per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial

import torch
from torch import Tensor

from poplar.comm import Codec, Communicator, Encoded, Work
from poplar.comm.communicator import CallbackWork, own_slice
from poplar.comm.shard_layout import Layout
from poplar.zero.checks.placeholder_gradient import put_back
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.stages.sharded_optimizer import LocalAccumulation
from poplar.zero.stages.strategy import Layouts
from poplar.zero.unit import Unit


class Replicated(LocalAccumulation):
    """All-gathers the reduced slices, so that every rank updates with the full mean gradient.

    The gradient stays in the accumulation buffer, with the same bits on all ranks; `.grad` is a
    view of it.
    """

    replicates_state = True
    shows_gradients = True

    def __init__(self, comm: Communicator, reduce_dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(comm, reduce_dtype, device)
        self._pending_all_gathers: list[Work] = []

    def layouts(self, flats: Mapping[FlatParameter, Sequence[float]]) -> Layouts:
        """Even for any shares: nothing is owned, the layouts only divide the reductions."""
        size = self.comm.group.size
        return super().layouts(dict.fromkeys(flats, (1.0 / size,) * size))

    def change_layout(self, flat: FlatParameter, new: Layout, master: Tensor | None) -> None:
        raise AssertionError("the layout does not depend on the shares")

    def owned_part(self, layout: Layout, rank: int) -> tuple[int, int]:
        return 0, layout.numel

    def _new_gradient(self, flat: FlatParameter) -> Tensor:
        return self._allocate_sums(flat).data

    def begin_step(self) -> None:
        super().begin_step()
        self._wait_for_all_gathers()  # left over if the previous step failed

    def _reduction(self, flat: FlatParameter, codec: Codec) -> Work:
        """Starts the all-gather when it ends, overlapping with the next reductions."""
        encoded = self.next_codec(flat, self.communication.gradients)
        gather = partial(self._all_gather, flat, encoded)
        return CallbackWork(super()._reduction(flat, codec), gather)

    def _all_gather(self, flat: FlatParameter, codec: Encoded | None) -> None:
        """With a codec every rank, the owner included, gets the values that the owner encodes."""
        what = f"the gradients of {flat.name}"
        if codec is None:
            work = self.comm.all_gather(flat.gradient, flat.layout, what=what)
        else:
            rank, layout = self.comm.group.rank, codec.wire_layout(flat.layout)
            encoded = torch.empty(layout.numel, dtype=codec.wire_dtype, device=flat.device)
            own = own_slice(flat.gradient, flat.layout, rank)
            codec.encode(own_slice(encoded, layout, rank), [own], [0], flat.layout.bounds(rank)[0])
            gathered = self.comm.all_gather(encoded, layout, what=what)
            work = CallbackWork(gathered, partial(codec.decode, flat.gradient, encoded))
        self._pending_all_gathers.append(work)

    def finish_gradients(self, units: Sequence[Unit]) -> None:
        self._wait_for_all_gathers()
        for unit in units:
            for flat in unit.trained:
                if flat in self._allocated:  # not if the step was abandoned before this unit
                    _expose_gradients(flat)
                flat.drop_squares()

    def _wait_for_all_gathers(self) -> None:
        pending, self._pending_all_gathers = self._pending_all_gathers, []
        if pending:
            self.reductions.finish_following(pending, "the gradients")

    def scale_gradients(self, units: Sequence[Unit], factor: Tensor) -> bool:
        """Scale at once: `.grad` shows what the update applies."""
        gradients = [flat.gradient for unit in units for flat in unit.trained]
        torch._foreach_mul_(gradients, factor.float())
        return True

    def read_back_gradients(self, flat: FlatParameter) -> Set[int]:
        if flat not in self._allocated:  # the step was abandoned before this unit
            return set()
        removed = set()
        start, step = flat.gradient.data_ptr(), flat.gradient.element_size()
        for position, (parameter, offset) in enumerate(
            zip(flat.parameters, flat.offsets, strict=True)
        ):
            gradient, part = parameter.grad, slice(offset, offset + parameter.numel())
            if gradient is None:
                flat.gradient[part].zero_()
                removed.add(position)
            elif gradient.data_ptr() != start + offset * step:
                flat.gradient[part].copy_(gradient.reshape(-1))
                parameter.grad = flat.gradient[part].view(parameter.shape)
                flat.used.add(position)  # also if no backward has used it
            elif position in flat.removed:
                raise put_back(self.comm.group.name, flat.names[position])
        return removed

    def all_gather_updated_parameters(self, units: Sequence[Unit]) -> None:
        """Nothing to send if every rank has updated all parameters with the same bits.

        Otherwise each rank sends the slice that it also reduces, and the others drop their own
        result. Its state of that slice has always had the same bits as the parameters.
        """
        if self.updates_agree:
            return
        trained = [flat for unit in units for flat in unit.trained]
        updated = [flat.master.to(flat.device) for flat in trained]
        pending = [
            self.comm.all_gather(values, flat.layout, what=f"the updated parameters of {flat.name}")
            for flat, values in zip(trained, updated, strict=True)
        ]
        for flat, values, gather in zip(trained, updated, pending, strict=True):
            self.timing.wait_for(gather, "the updated parameters")
            flat.master.copy_(values)
            flat.shard.copy_(values)


def _expose_gradients(flat: FlatParameter) -> None:
    """Set `.grad` to the mean gradient: a view of the buffer, in fp32. Not of what is left out."""
    pairs = enumerate(zip(flat.parameters, flat.offsets, strict=True))
    for position, (parameter, offset) in pairs:
        if flat.dtype is not torch.float32:
            parameter.grad_dtype = None  # of any dtype
        if position not in flat.removed:
            part = slice(offset, offset + parameter.numel())
            parameter.grad = flat.gradient[part].view(parameter.shape)

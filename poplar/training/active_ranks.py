"""The ranks that train, beside those that the plan leaves out.

[Note: ranks that are left out] The active ranks of a plan with `Plan.left_out` have process groups
of their own and the plan of these ranks alone, so nothing in the engine knows of the others. A rank
that is left out has no engine. It makes the same calls as the others, and waits in each until the
first active rank has announced the result through the store. The active ranks never wait for it. So
the loops of all ranks stay in step, and a step costs the active ranks nothing. Only
`full_parameters` and `release` send it values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from poplar.comm import Communicator, Control, Group, connect, connect_control
from poplar.comm.announcements import Announcements
from poplar.values.communication import Communication
from poplar.values.errors import agreed
from poplar.values.plan import Plan
from poplar.zero.checks.replica_check import replicate

T = TypeVar("T")

_DOING = "full_parameters()"


class ActiveRanks:
    """Which ranks train, as this rank sees them. A change of the ranks makes another one."""

    announcements: Announcements | None = None
    """On the first active rank, which sends them, and on ranks that are left out, if there are."""
    _values_group: Group | None = None
    """The first active rank and those that are left out, on each of these, if there are."""

    def __init__(
        self,
        whole: Group,
        control: Control,
        communicator: str | Communicator,
        left_out: tuple[int, ...] = (),
        *,
        has_values: bool = True,
        changes: int = 0,
    ) -> None:
        """Collective over all ranks (`whole`), with their control channel.

        Args:
            communicator: as for `connect`.
            has_values: the model was not built on `meta`.
            changes: of the ranks that are left out, before.
        """
        self.whole, self.whole_control, self.communicator = whole, control, communicator
        self.left_out, self.is_active = left_out, whole.rank not in left_out
        self.active = tuple(rank for rank in range(whole.size) if rank not in left_out)
        self.group, self.control = whole, control
        """Of the active ranks, or on a rank that is left out of those."""
        self._has_values = has_values
        self.changes = changes
        """How often the ranks that are left out have changed; equal on all ranks."""
        if not left_out:
            return
        first, *rest = self.active
        self.group = whole.split([self.active, left_out])
        values = whole.split([[first, *left_out], *([rest] if rest else [])])
        if whole.rank not in rest:
            self.announcements = Announcements(whole, left_out, changes)
            self._values_group = values
        self.control = connect_control(self.group, communicator)

    def changed(self, left_out: tuple[int, ...]) -> ActiveRanks:
        """The same ranks, of which others are left out. Collective over all ranks."""
        given = self.whole, self.whole_control, self.communicator, left_out
        return ActiveRanks(*given, has_values=self._has_values, changes=self.changes + 1)

    def close(self) -> None:
        """Make no later calls; what is announced in the one of now still arrives. Local."""
        self.announcements = None

    def receiver(self, to: int, doing: str) -> int:
        """The number of rank `to` in the group of the active ranks. Collective over these.

        It raises on all ranks if there is none, if it is left out, or if ranks pass different ones.
        """
        received = self.control.exchange_objects(to, what=doing)
        if to in self.left_out and len(set(received)) == 1:
            raise agreed(ValueError(f"rank {to} is left out by the plan, so it gets no state"))
        if to not in self.active or len(set(received)) > 1:
            raise agreed(
                ValueError(
                    f"to={to!r} must be one of the {self.whole.size} ranks, which count from 0, "
                    f"and the same on all ranks; they gave {self.group.by_name(received)}"
                )
            )
        return self.active.index(to)

    def of_all(self, values: Sequence[T], absent: T) -> tuple[T, ...]:
        """Values of the active ranks as values by rank of all, with `absent` for the others."""
        by_rank = self.group.by_name(values)
        return tuple(by_rank.get(rank, absent) for rank in range(self.whole.size))

    @torch.no_grad()
    def share_values(self, model: nn.Module, names: Sequence[str]) -> None:
        """Copy parameters and buffers of the first active rank to the ranks that are left out.

        Collective for them. It raises on those whose model is on `meta`.
        """
        if not self._has_values:
            if self.is_active:
                return
            raise RuntimeError(
                f"rank {self.whole.rank} is left out by the plan, and its model is on meta, so "
                f"{_DOING} cannot give it values; call it on the active ranks only "
                "(optimizer.is_active)"
            )
        known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.share_tensors({name: known[name] for name in names if name in known}, _DOING)

    @torch.no_grad()
    def share_tensors(self, tensors: Mapping[str, Tensor], doing: str) -> None:
        """As the function `share_tensors`, to the ranks that are left out. Collective for them."""
        if self._values_group is not None:
            share_tensors(self._values_group, tensors, doing)


def share_tensors(group: Group, tensors: Mapping[str, Tensor], doing: str) -> None:
    """Copy tensors of the first rank of a group to the others. Collective for them.

    Each rank keeps its own buffers of other shapes, and those that others do not have: forwards
    enlarge and add buffers, such as masks and the tables of rotary embeddings.

    Raises:
        RuntimeError: a parameter is not alike on all ranks.
    """
    control = Control(group)
    own = {
        (name, tensor.shape, tensor.dtype): isinstance(tensor, nn.Parameter)
        for name, tensor in tensors.items()
    }
    by_rank = control.exchange_objects(own, what=doing)
    alike = set.intersection(*map(set, by_rank))
    unlike = [key[0] for each in by_rank for key in each if each[key] and key not in alike]
    if unlike:
        raise agreed(
            RuntimeError(
                f"{doing} cannot copy the parameter {unlike[0]!r}: it is missing, or it differs in "
                f"shape or dtype on the ranks {[*group.names]}"
            )
        )
    if alike:
        device = next(iter(tensors.values())).device
        comm = connect(group, "process_group" if group.supports(device) else "auto", device)
        same = {key[0]: tensors[key[0]] for key in by_rank[0] if key in alike}
        replicate(same, comm, control, doing=doing)


def state_plan(plan: Plan, ranks: Sequence[int], stage: int, *, even: bool = False) -> Plan:
    """A plan of some ranks, in their own numbers, by which state moves and no step is taken.

    `plan` is of all ranks and divides the state among these; `even`: their shares are even instead.
    """
    # The rank with most samples looks at the first losses of the plan that comes next.
    most = max(range(plan.world_size), key=plan.samples)
    looking = most if most in ranks else ranks[0]
    given: dict[str, Any] = {}
    if even:
        shares = [1.0 / len(ranks) if rank in ranks else 0.0 for rank in range(plan.world_size)]
        given = {"shares": tuple(shares), "host_state": ()}
    return replace(
        plan,
        stage=stage,
        global_batch=1,
        micro_batches=tuple(
            (int(rank == looking),) if rank in ranks else () for rank in range(plan.world_size)
        ),
        units=(),
        communication=Communication(),
        left_out=tuple(rank for rank in range(plan.world_size) if rank not in ranks),
        **given,
    ).of_active_ranks()

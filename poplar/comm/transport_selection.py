"""Which transport carries a group's tensors, and which its agreements."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from poplar.comm import host_topology
from poplar.comm.algorithms import ALL_GATHERS, REDUCE_SCATTERS
from poplar.comm.communicator import Communicator
from poplar.comm.control_channel import Control
from poplar.comm.group import Group
from poplar.comm.hierarchical import HierarchicalCommunicator, Neighbours
from poplar.comm.hierarchical_process_group import NestedCommunicator
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.rendezvous import NotOneHost, Rendezvous
from poplar.comm.shared_memory import SharedMemoryCommunicator
from poplar.comm.shared_segment import addresses
from poplar.comm.staged import HOST, StagedCommunicator

T = TypeVar("T")

AGREEMENT_BYTES = 1 << 30
"""Addresses that each rank sets aside to share; of memory it takes what it uses."""
CHOICES = ("auto", "process_group", "shared_memory", "hierarchical", "staged")


def connect(
    group: Group,
    choice: str | Communicator,
    device: torch.device = HOST,
    *,
    planned: str | None = None,
) -> Communicator:
    """The transport for a group. Collective.

    Args:
        group: who takes part.
        device: of the tensors; only those on the CPU can be shared.
        choice: `"process_group"` (NCCL, gloo), also with the names of two `algorithms`, for sums
            and for gathers, as in `"process_group:padded+grouped"`; `"shared_memory"` (CPU ranks of
            one host); `"hierarchical"` (shared memory on each of several hosts);
            `"hierarchical:process_group"` (NCCL or gloo on each of them); `"staged"` (any device,
            by way of host memory); `"auto"`: shared memory where that is possible, the hierarchical
            way where some of several hosts have more than one rank, staged for devices whose
            tensors the process group does not carry (GPUs beside gloo), else the process group; or
            a communicator built by the caller.
        planned: what a plan names, which is taken where the choice is `"auto"`.

    Raises:
        ValueError: an unknown name, shared memory for tensors that are not on the CPU, or a plan's
            transport that these ranks can't have.
        NotOneHost: shared memory was asked for, and the ranks have none.
    """
    if isinstance(choice, Communicator):
        return choice
    if choice == "auto" and planned is not None:
        try:
            return connect(group, planned, device)
        except (ValueError, NotOneHost) as error:
            raise ValueError(
                f"the plan's transport, {planned!r}, can't be had here: {error}. Plan again on "
                "these ranks, or say which to take: communicator='process_group', for example"
            ) from error
    name, algorithms = _parsed(choice)
    if name == "hierarchical" and algorithms:
        return _nested(group, device)
    if name in ("shared_memory", "hierarchical") and device.type != "cpu":
        raise ValueError(
            f"communicator={choice!r} is for tensors on the CPU, the model's are on {device}; "
            "use 'auto', 'process_group', 'hierarchical:process_group' or 'staged'"
        )
    if name == "staged" or (name == "auto" and not group.carries(device)):
        if not group.is_on_host(HOST):  # NCCL alone: what agreements use carries the host's tensors
            group = replace(group, process_group=group.control_group)
        return StagedCommunicator(connect(group, "auto"))
    can = group.is_on_host(device) and device.type == "cpu" and group.size > 1
    if name == "process_group" or (name == "auto" and not can):
        return ProcessGroupCommunicator(group, *algorithms)
    control = Control(group)
    places = control.exchange_objects(host_topology.place(), what="looking for ranks on one host")
    found = host_topology.Hosts.of(places)
    if name == "auto" and len(found.members) == group.size:
        return ProcessGroupCommunicator(group)
    try:
        if name == "hierarchical" or (name == "auto" and len(found.members) > 1):
            return _hierarchical(group, control, found)
        return SharedMemoryCommunicator(
            Rendezvous(group, control.exchange_objects, addresses(group.size))
        )
    except NotOneHost:
        if name != "auto":
            raise
    return ProcessGroupCommunicator(group)


def _parsed(choice: str) -> tuple[str, tuple[str, ...]]:
    """The transport and, of a process group, the algorithms.

    Raises:
        ValueError: a name that is not known.
    """
    name, colon, rest = choice.partition(":")
    algorithms = tuple(rest.split("+")) if colon else ()
    if choice == "hierarchical:process_group":
        return name, algorithms
    if name not in CHOICES or (colon and name != "process_group"):
        raise ValueError(
            f"communicator={choice!r} is not known; use one of {', '.join(map(repr, CHOICES))} or "
            "a poplar.comm.Communicator"
        )
    if algorithms and not (
        len(algorithms) == 2 and algorithms[0] in REDUCE_SCATTERS and algorithms[1] in ALL_GATHERS
    ):
        raise ValueError(
            f"communicator={choice!r} is not known: after the colon comes how to add "
            f"({', '.join(REDUCE_SCATTERS)}), a plus and how to gather ({', '.join(ALL_GATHERS)}), "
            "as in 'process_group:padded+grouped'"
        )
    return name, algorithms


def _nested(group: Group, device: torch.device) -> Communicator:
    """Over hosts each of whose ranks have a process group of their own."""
    if not group.is_on_host(device):
        # NCCL connects all ranks in the group's first collective; few take part in a message.
        dist.all_reduce(torch.zeros(1, device=device), group=group.process_group)
    places = Control(group).exchange_objects(
        host_topology.place(), what="looking for ranks on one host"
    )
    found = host_topology.Hosts.of(places)
    return NestedCommunicator(group, found, group.part(found.members))


def _hierarchical(group: Group, control: Control, found: host_topology.Hosts) -> Communicator:
    """Over hosts each of whose ranks can share memory.

    Raises:
        NotOneHost: on all ranks, if those of one host cannot.
    """
    neighbours = Neighbours(group, found.members[found.host_of(group.rank)])

    def exchange(value: T, /, *, what: str) -> list[T]:
        values = control.exchange_objects(value, what=what)
        return [values[rank] for rank in neighbours.ranks]

    board, trouble = None, ""
    try:
        board = Rendezvous(neighbours, exchange, addresses(neighbours.size))
    except NotOneHost as error:
        trouble = str(error)
    troubles = [t for t in control.exchange_objects(trouble, what="agreeing on hosts") if t]
    if board is None or troubles:
        raise NotOneHost(troubles[0])
    return HierarchicalCommunicator(group, found, board)


def control_of(group: Group, choice: str | Communicator = "auto") -> Control:
    """Agreements by shared memory between ranks of one host, by gloo otherwise. Collective.

    Args:
        group: who takes part.
        choice: of the transport; who asks for the process group gets it for agreements too.

    Raises:
        ValueError: on all ranks, if they chose differently.
    """
    control = Control(group)
    name = choice if isinstance(choice, str) else type(choice).__name__
    names = control.exchange_objects(name, what="agreeing on the communicator")
    if len({*names}) > 1:
        said = ", ".join(f"rank {rank} says {name!r}" for rank, name in enumerate(names))
        raise ValueError(f"communicator must be the same on all ranks; {said}")
    if group.size == 1 or name.startswith("process_group"):
        return control
    try:
        return Control(group, Rendezvous(group, control.exchange_objects, AGREEMENT_BYTES))
    except NotOneHost:
        return control

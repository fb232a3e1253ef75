"""Which transport carries a group's tensors, and which its agreements."""

from __future__ import annotations

from typing import TypeVar

import torch

from poplar.comm import hosts
from poplar.comm.board import Board, NotOneHost
from poplar.comm.communicator import Communicator
from poplar.comm.control import Control
from poplar.comm.group import Group
from poplar.comm.hierarchical import HierarchicalCommunicator, Neighbours
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.shared_memory import SharedMemoryCommunicator

T = TypeVar("T")

TENSOR_BYTES, AGREEMENT_BYTES = 1 << 38, 1 << 32
"""Addresses that each rank sets aside to share; of memory it takes what it uses."""
CPU = torch.device("cpu")
CHOICES = ("auto", "process_group", "shared_memory", "hierarchical")


def connect(group: Group, choice: str | Communicator, device: torch.device = CPU) -> Communicator:
    """The transport for a group. Collective.

    Args:
        group: who takes part.
        device: of the tensors; only those on the CPU can be shared.
        choice: `"process_group"` (NCCL, gloo); `"shared_memory"` (CPU ranks of one host);
            `"hierarchical"` (shared memory on each of several hosts); `"auto"`: shared memory where
            that is possible, the hierarchical way where some of several hosts have more than one
            rank, else the process group; or a communicator built by the caller.

    Raises:
        ValueError: an unknown name, or shared memory for tensors that are not on the CPU.
        NotOneHost: shared memory was asked for, and the ranks have none.
    """
    if isinstance(choice, Communicator):
        return choice
    if choice not in CHOICES:
        raise ValueError(
            f"communicator={choice!r} is not known; use one of {', '.join(map(repr, CHOICES))} or "
            "a poplar.comm.Communicator"
        )
    if choice in ("shared_memory", "hierarchical") and device.type != "cpu":
        raise ValueError(
            f"communicator={choice!r} is for tensors on the CPU, the model's are on {device}; "
            "use 'auto' or 'process_group'"
        )
    can = group.backend == "gloo" and device.type == "cpu" and group.size > 1
    if choice == "process_group" or (choice == "auto" and not can):
        return ProcessGroupCommunicator(group)
    control = Control(group)
    places = control.exchange_objects(hosts.place(), what="looking for ranks on one host")
    found = hosts.Hosts.of(places)
    if choice == "auto" and len(found.members) == group.size:
        return ProcessGroupCommunicator(group)
    try:
        if choice == "hierarchical" or (choice == "auto" and len(found.members) > 1):
            return _hierarchical(group, control, found)
        return SharedMemoryCommunicator(Board(group, control.exchange_objects, TENSOR_BYTES))
    except NotOneHost:
        if choice != "auto":
            raise
    return ProcessGroupCommunicator(group)


def _hierarchical(group: Group, control: Control, found: hosts.Hosts) -> Communicator:
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
        board = Board(neighbours, exchange, TENSOR_BYTES)
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
    if group.size == 1 or choice == "process_group":
        return control
    try:
        return Control(group, Board(group, control.exchange_objects, AGREEMENT_BYTES))
    except NotOneHost:
        return control

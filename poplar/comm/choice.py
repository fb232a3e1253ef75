"""Which transport carries a group's tensors, and which its agreements."""

from __future__ import annotations

import torch

from poplar.comm.board import Board, NotOneHost
from poplar.comm.communicator import Communicator
from poplar.comm.control import Control
from poplar.comm.group import Group
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.shared_memory import SharedMemoryCommunicator

TENSOR_BYTES, AGREEMENT_BYTES = 1 << 38, 1 << 32
"""Addresses that each rank sets aside to share; of memory it takes what it uses."""
CPU = torch.device("cpu")
CHOICES = ("auto", "process_group", "shared_memory")


def connect(group: Group, choice: str | Communicator, device: torch.device = CPU) -> Communicator:
    """The transport for a group. Collective.

    Args:
        group: who takes part.
        device: of the tensors; only those on the CPU can be shared.
        choice: `"process_group"` (NCCL, gloo); `"shared_memory"` (CPU ranks of one host);
            `"auto"`: shared memory where it is possible, else the process group; or a communicator
            built by the caller.

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
    if choice == "shared_memory" and device.type != "cpu":
        raise ValueError(
            f"communicator='shared_memory' is for tensors on the CPU, the model's are on {device}; "
            "use 'auto' or 'process_group'"
        )
    can = group.backend == "gloo" and device.type == "cpu"
    shares = choice == "shared_memory" or (choice == "auto" and can)
    if shares and (choice == "shared_memory" or group.size > 1):
        try:
            return SharedMemoryCommunicator(
                Board(group, Control(group).exchange_objects, TENSOR_BYTES)
            )
        except NotOneHost:
            if choice == "shared_memory":
                raise
    return ProcessGroupCommunicator(group)


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

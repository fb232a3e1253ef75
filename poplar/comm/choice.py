"""Which transport carries a group's tensors."""

from __future__ import annotations

from poplar.comm.communicator import Communicator
from poplar.comm.group import Group
from poplar.comm.process_group import ProcessGroupCommunicator


def connect(group: Group, choice: str | Communicator) -> Communicator:
    """The transport for a group.

    Args:
        group: who takes part.
        choice: `"auto"`, `"process_group"`, or a communicator built by the caller.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(choice, Communicator):
        return choice
    if choice in ("auto", "process_group"):
        return ProcessGroupCommunicator(group)
    raise ValueError(
        f"communicator={choice!r} is not known; use 'auto', 'process_group' or a "
        "poplar.comm.Communicator"
    )

"""Selection of the transport for a group's tensors and for its control channel."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from poplar.comm import host_topology
from poplar.comm.communicator import Communicator
from poplar.comm.control_channel import Control
from poplar.comm.group import Group
from poplar.comm.hierarchy.transport import HierarchicalCommunicator
from poplar.comm.host_buffers import HOST
from poplar.comm.host_memory.rendezvous import NotOneHost, Rendezvous
from poplar.comm.host_memory.segment import segment_bytes
from poplar.comm.host_memory.transport import SharedMemoryCommunicator
from poplar.comm.host_topology import Hosts
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.staged import StagedCommunicator
from poplar.values.errors import agreed
from poplar.values.host_traffic import is_hierarchical

T = TypeVar("T")

CONTROL_SEGMENT_BYTES = 1 << 30
"""Addresses that each rank reserves for the control channel; memory is taken as needed."""
TRANSPORTS = (
    "auto",
    "process_group",
    "shared_memory",
    "hierarchical",
    "hierarchical:process_group",
    "staged",
)


def connect(
    group: Group,
    choice: str | Communicator,
    device: torch.device = HOST,
    *,
    planned: str | None = None,
) -> Communicator:
    """The transport for a group. Collective.

    Args:
        choice: `"process_group"` (NCCL, gloo); `"shared_memory"` (CPU ranks of one host);
            `"hierarchical"` (shared memory on each of several hosts);
            `"hierarchical:process_group"` (NCCL or gloo on each of them); `"staged"` (any device,
            through host memory); or a communicator built by the caller. `"auto"` takes staged for
            devices that the process group does not support (GPUs with gloo), shared memory or
            hierarchical for CPU ranks that share a host, `"hierarchical:process_group"` for devices
            if some of several hosts have several ranks, and otherwise the process group.
        device: of the tensors; only CPU tensors can be shared.
        planned: the plan's transport, which is used if `choice` is `"auto"`.

    Raises:
        ValueError: an unknown name, a transport that does not support tensors of this device, or a
            plan's transport that is not available to these ranks.
        NotOneHost: shared memory was requested, but the ranks cannot share memory.
    """
    if isinstance(choice, Communicator):
        return choice
    try:
        if choice == "auto" and planned is not None:
            return _connect_planned(group, planned, device)
        return _connect(group, choice, device)
    except (ValueError, NotOneHost) as error:
        raise agreed(error)  # noqa: B904 (all ranks raise it)


def _connect(group: Group, choice: str, device: torch.device) -> Communicator:
    """As `connect`; what it raises follows from what is equal on all ranks."""
    if choice not in TRANSPORTS:
        raise ValueError(
            f"communicator={choice!r} is not known; use one of "
            f"{', '.join(map(repr, TRANSPORTS))} or a poplar.comm.Communicator"
        )
    if choice == "staged" or (choice == "auto" and not group.supports(device)):
        if not group.is_on_host(HOST):  # NCCL alone: the control group carries host tensors
            group = replace(group, process_group=group.control_group)
        return StagedCommunicator(connect(group, "auto"))
    _check_device(group, choice, device)
    if choice == "process_group":
        return ProcessGroupCommunicator(group)
    control = Control(group)
    hosts = _find_hosts(control)
    if choice != "auto":
        return _connect_to_hosts(group, choice, control, hosts)
    try:
        return _connect_to_hosts(group, _default(group, hosts, device), control, hosts)
    except NotOneHost:
        return ProcessGroupCommunicator(group)


def _default(group: Group, hosts: Hosts, device: torch.device) -> str:
    """The transport of `"auto"`."""
    share_host = len(hosts.members) < group.size
    if share_host and device.type == "cpu" and group.is_on_host(device):
        return "shared_memory" if len(hosts.members) == 1 else "hierarchical"
    relieves = is_hierarchical([len(ranks) for ranks in hosts.members])
    return "hierarchical:process_group" if relieves else "process_group"


def _connect_to_hosts(group: Group, choice: str, control: Control, hosts: Hosts) -> Communicator:
    """A transport for ranks whose hosts are known. Collective.

    Raises:
        NotOneHost: on all ranks, if those of a host cannot share memory.
    """
    if choice == "process_group":
        return ProcessGroupCommunicator(group)
    if choice == "hierarchical:process_group":
        return HierarchicalCommunicator(group, hosts, group.split(hosts.members))
    if choice == "hierarchical":
        return HierarchicalCommunicator(group, hosts, _memory_of_host(group, control, hosts))
    return SharedMemoryCommunicator(
        Rendezvous(group, control.exchange_objects, segment_bytes(group.size))
    )


def _check_device(group: Group, choice: str, device: torch.device) -> None:
    """Raise a ValueError if a transport does not support tensors of this device."""
    if choice in ("shared_memory", "hierarchical") and device.type != "cpu":
        raise ValueError(
            f"communicator={choice!r} is for tensors on the CPU, the model's are on {device}; "
            "use 'auto', 'process_group', 'hierarchical:process_group' or 'staged'"
        )
    if not group.supports(device):
        backend = dist.get_backend_config(group.process_group)
        raise ValueError(
            f"communicator={choice!r} cannot carry tensors on {device} over the backend "
            f"{backend!r}; use 'auto' or 'staged' (through host memory), or initialize the process "
            "group with a backend for this device, such as 'nccl'"
        )


def _connect_planned(group: Group, planned: str, device: torch.device) -> Communicator:
    try:
        return connect(group, planned, device)
    except (ValueError, NotOneHost) as error:
        raise ValueError(
            f"the plan's transport {planned!r} is not available here: {error}. Plan again on "
            "these ranks, or choose a transport, for example communicator='process_group'"
        ) from error


def _find_hosts(control: Control) -> Hosts:
    what = "looking for ranks on one host"
    return Hosts.of(control.exchange_objects(host_topology.host_id(), what=what))


def _memory_of_host(group: Group, control: Control, hosts: Hosts) -> Rendezvous:
    """The shared memory of the ranks of this host. Collective; raises as `_connect_to_hosts`."""
    members = hosts.members[hosts.host_of(group.rank)]
    host_group = group.on_host(members)

    def exchange(value: T, /, *, what: str) -> list[T]:
        values = control.exchange_objects(value, what=what)
        return [values[rank] for rank in members]

    rendezvous, error = None, ""
    try:
        rendezvous = Rendezvous(host_group, exchange, segment_bytes(host_group.size))
    except NotOneHost as cause:
        error = str(cause)
    errors = [text for text in control.exchange_objects(error, what="agreeing on hosts") if text]
    if rendezvous is None or errors:
        raise NotOneHost(errors[0])
    return rendezvous


def connect_control(group: Group, choice: str | Communicator = "auto") -> Control:
    """The control channel: shared memory between ranks of one host, otherwise gloo. Collective.

    Args:
        choice: of the transport; `"process_group"` also applies to the control channel.

    Raises:
        ValueError: on all ranks, if the ranks chose differently.
    """
    first = Control(group)
    name = choice if isinstance(choice, str) else type(choice).__name__
    own = name, host_topology.host_id()
    names, host_ids = zip(
        *first.exchange_objects(own, what="agreeing on the communicator"), strict=True
    )
    if len({*names}) > 1:
        by_rank = group.by_name(names).items()
        given = ", ".join(f"rank {rank} has {name!r}" for rank, name in by_rank)
        raise agreed(ValueError(f"communicator must be the same on all ranks, got: {given}"))
    spans_hosts = len(set(host_ids)) > 1
    rendezvous = None
    if group.size > 1 and name != "process_group":
        with suppress(NotOneHost):
            rendezvous = Rendezvous(group, first.exchange_objects, CONTROL_SEGMENT_BYTES)
    # Until here a rank that fails can tell the others in the first channel only.
    first.exchange_objects(None, what="sharing memory")
    return Control(group, rendezvous, spans_hosts=spans_hosts)

"""Checks of how ranks reach each other: GPUs of a host, shared memory, and other hosts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from poplar.doctor.facts import RankFacts
from poplar.doctor.finding import Finding, advice, problem
from poplar.values.formatting import format_bytes

_SMALL_SHARED_MEMORY = 128 << 20
"""Bytes per rank. Containers have 64 MiB for all processes by default."""


def by_host(ranks: Iterable[RankFacts]) -> list[list[RankFacts]]:
    """The ranks of each host."""
    hosts = defaultdict(list)
    for rank in ranks:
        hosts[(rank.host_id, rank.device.host)].append(rank)
    return list(hosts.values())


def all_gpus_are_examined(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """A single process knows nothing about the other GPUs of its host."""
    if len(ranks) == 1 and ranks[0].peer_access:
        number = len(ranks[0].peer_access) + 1
        fix = f"torchrun --nproc-per-node {number} -m poplar doctor compares all of them"
        yield advice(ranks, f"{number} GPUs are visible, and one of them was examined", fix)


def gpus_read_each_other(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Peer-to-peer access between the GPUs of each host, and what NCCL uses without it."""
    for on_host in by_host(ranks):
        gpus = [rank for rank in on_host if rank.device.kind == "cuda"]
        pairs = itertools.combinations(gpus, 2)
        apart = [(a, b) for a, b in pairs if a.peer_access.get(b.device.uuid) is False]
        if apart:
            numbers = ", ".join(f"{a.rank} and {b.rank}" for a, b in apart)
            names = ", ".join(sorted({rank.device.name for pair in apart for rank in pair}))
            yield advice(
                gpus,
                f"no peer-to-peer access between ranks {numbers} ({names})",
                "NCCL copies through host memory (SHM), which is slower and needs space in "
                "/dev/shm; the profile measures it",
            )


def host_names_differ(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Ranks are grouped by host name, so two hosts must not have the same."""
    ids = defaultdict(set)
    for rank in ranks:
        ids[rank.device.host].add(rank.host_id)
    for name, several in ids.items():
        if len(several) > 1:
            yield problem(
                [rank for rank in ranks if rank.device.host == name],
                f"{len(several)} hosts have the same name {name!r}",
                "give each host a unique name; ranks with one host name count as one host",
            )


def hosts_can_be_reached(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Hosts are connected by gloo, on CUDA as well."""
    if len(by_host(ranks)) == 1:
        return
    unreachable = [
        rank
        for rank in ranks
        if "GLOO_SOCKET_IFNAME" not in rank.settings
        and (not rank.address or rank.address.startswith("127."))
    ]
    if unreachable:
        names = ", ".join(sorted({rank.device.host for rank in unreachable}))
        yield problem(
            unreachable,
            f"the host name ({names}) resolves to a loopback address or not at all, so other hosts "
            "cannot connect",
            "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface between the "
            "hosts, or correct /etc/hosts",
        )


def shared_memory_is_large(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Free space of `/dev/shm` on each host."""
    for on_host in by_host(ranks):
        free = [rank.shared_memory_bytes[0] for rank in on_host if rank.shared_memory_bytes]
        needed = _SMALL_SHARED_MEMORY * len(on_host)
        if not free or min(free) < needed:
            there = f"{format_bytes(min(free))} free in /dev/shm" if free else "no /dev/shm"
            yield advice(
                on_host,
                f"{there}, {format_bytes(needed)} expected for {len(on_host)} ranks",
                "DataLoader workers need it, and NCCL between GPUs without peer-to-peer access "
                "(Poplar's own shared memory does not); start the container with --shm-size=8g or "
                "--ipc=host",
            )

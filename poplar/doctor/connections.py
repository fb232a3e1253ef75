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

_TURNED_OFF_BY = {
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_P2P_LEVEL": ("LOC", "0"),
    "NCCL_SHM_DISABLE": ("1",),
}
"""Settings and values that turn off a transport of NCCL."""


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
        pairs = list(itertools.combinations(gpus, 2))
        apart = [(a, b) for a, b in pairs if a.peer_access.get(b.device.uuid) is False]
        disabled_by = _settings_against(gpus, "P2P")
        if pairs and disabled_by:
            what = f"peer-to-peer access is turned off by {disabled_by}"
        elif apart:
            numbers = ", ".join(f"{a.rank} and {b.rank}" for a, b in apart)
            names = ", ".join(sorted({rank.device.name for pair in apart for rank in pair}))
            what = f"no peer-to-peer access between ranks {numbers} ({names})"
        else:
            continue
        yield advice(gpus, what, _without_peer_access(gpus))


def _without_peer_access(gpus: Sequence[RankFacts]) -> str:
    disabled_by = _settings_against(gpus, "SHM")
    if disabled_by:
        return f"NCCL uses sockets, because of {disabled_by}; unset it"
    return (
        "NCCL copies through host memory (SHM), which is slower and needs space in /dev/shm; the "
        "profile measures it"
    )


def _settings_against(ranks: Iterable[RankFacts], transport: str) -> str:
    """The settings that turn off "P2P" or "SHM" of NCCL, such as "NCCL_P2P_LEVEL=LOC"."""
    found = {
        f"{name}={rank.settings[name]}"
        for rank in ranks
        for name, values in _TURNED_OFF_BY.items()
        if transport in name and rank.settings.get(name) in values
    }
    return ", ".join(sorted(found))


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
    """Hosts are connected by gloo, on CUDA as well. NCCL takes no loopback interface by itself."""
    if len(by_host(ranks)) == 1:
        return
    fix = (
        "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface between the hosts"
    )
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
            f"{fix}, or correct /etc/hosts",
        )
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        local = [rank for rank in ranks if rank.settings.get(name) == "lo"]
        if local:
            yield problem(local, f"{name}=lo, so other hosts cannot connect", fix)


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

"""What the facts of a job's ranks say about how it will go: one check per cause of trouble."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from poplar.doctor.facts import RankFacts
from poplar.doctor.finding import Finding
from poplar.doctor.words import grouped, listed, size

_SMALL_SHARED_MEMORY = 64 << 20
"""Bytes per rank: what containers give all of their processes together if nobody asks for more."""

_MUST_BE_EQUAL = {
    "poplar": "install one version on all of them",
    "torch": "install one version on all of them",
    "NCCL": "install one version: others hang in the first collective, or fail there",
}
_SHOULD_BE_EQUAL = {
    "CUDA": "works where NCCL is the same; old and new cards may need different builds of torch",
    "driver": "works if each driver is new enough for torch's CUDA; update the older one",
    "python": "works; pickled objects (datasets, checkpoints) may not travel between them",
}


def findings(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """What the facts of a job's ranks say about how it will go; problems first."""
    found = itertools.chain.from_iterable(check(ranks) for check in _CHECKS)
    yield from sorted(found, key=lambda finding: finding.kind != "problem")


def _versions_are_equal(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for kind, versions in (("problem", _MUST_BE_EQUAL), ("advice", _SHOULD_BE_EQUAL)):
        for name, remedy in versions.items():
            # "2.13.0+cu126" and "2.13.0+cu130" are one version, built twice.
            values = [rank.versions.get(name, "none").partition("+")[0] for rank in ranks]
            yield from _odd_ones(ranks, values, kind, name, remedy)


def _devices_are_of_one_kind(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    kinds = [rank.device.kind for rank in ranks]
    remedy = "one process group serves CPUs or CUDA devices; give every rank the same kind"
    yield from _odd_ones(ranks, kinds, "problem", "kind of device", remedy)
    machines = [rank.machine for rank in ranks]
    remedy = "works; sums may differ in their last bits from a run on one architecture"
    yield from _odd_ones(ranks, machines, "advice", "architecture", remedy)


def _all_multiply_bf16(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [rank for rank in ranks if "bfloat16" not in rank.dtypes]
    if without:
        names = ", ".join(sorted({rank.device.name for rank in without}))
        yield Finding(
            kind="advice",
            ranks=_numbers(without),
            what=f"no bfloat16 ({names})",
            remedy='compute_dtype="auto" takes float16, with one loss scale for all ranks; '
            "asking for bfloat16 is an error",
        )


def _torch_has_their_kernels(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for rank in ranks:
        if rank.device.capability is None or not rank.architectures:
            continue
        if not _has_kernels(rank.device.capability, rank.architectures):
            major, minor = rank.device.capability
            yield Finding(
                kind="problem",
                ranks=(rank.rank,),
                what=f"torch {rank.versions['torch']} has no kernels for {rank.device.name} "
                f"(sm_{major}{minor}; it has {', '.join(rank.architectures)})",
                remedy="install a build of torch for an older or newer CUDA",
            )


def _has_kernels(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Binary code runs on its own major version from its minor on; PTX on everything later."""
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")  # code for one architecture only, or for one family
        if not digits.isdigit():
            continue
        built_for = divmod(int(digits), 10)
        if kind == "compute" and built_for <= capability:
            return True
        if kind == "sm" and built_for[0] == capability[0] and built_for[1] <= capability[1]:
            return True
    return False


def _each_has_its_own_device(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    together = defaultdict(list)
    for rank in ranks:
        if rank.device.uuid:
            together[rank.device.uuid].append(rank)
    for sharers in together.values():
        if len(sharers) > 1:
            allowed = all(rank.may_share_device for rank in sharers)
            yield Finding(
                kind="advice" if allowed else "problem",
                ranks=_numbers(sharers),
                what=f"they share one device, {sharers[0].device.name}",
                remedy="pass each its part as memory_limit="
                if allowed
                else "start as many ranks per host as it has devices, and check "
                "CUDA_VISIBLE_DEVICES",
            )


def _a_transport_serves(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [rank for rank in ranks if rank.transport.startswith("none")]
    if without:
        yield Finding(
            kind="problem",
            ranks=_numbers(without),
            what=f"no transport ({without[0].transport})",
            remedy="install a build of torch with torch.distributed",
        )


def _hosts_find_each_other(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    nodes = defaultdict(set)
    for rank in ranks:
        nodes[rank.device.host].add(rank.node)
    for name, several in nodes.items():
        if len(several) > 1:
            yield Finding(
                kind="problem",
                ranks=_numbers(rank for rank in ranks if rank.device.host == name),
                what=f"{len(several)} nodes are all called {name!r}",
                remedy="give each host a name of its own: ranks of one name count as one host",
            )
    if len({rank.node for rank in ranks}) == 1:
        return
    hidden = [rank for rank in ranks if _is_loopback(rank.address) and not rank.interface]
    if hidden:
        names = ", ".join(sorted({rank.device.host for rank in hidden}))
        yield Finding(
            kind="problem",
            ranks=_numbers(hidden),
            what=f"the name of their host ({names}) leads back to itself or nowhere, so other "
            "hosts cannot reach them",
            remedy="set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that the "
            "hosts share, or correct /etc/hosts",
        )


def _is_loopback(address: str) -> bool:
    return not address or address.startswith("127.")


def _hosts_have_room(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    by_host = defaultdict(list)
    for rank in ranks:
        by_host[(rank.node, rank.device.host)].append(rank)
    for neighbours in by_host.values():
        yield from _shared_memory_suffices(neighbours)
        yield from _cores_suffice(neighbours)


def _cores_suffice(neighbours: Sequence[RankFacts]) -> Iterator[Finding]:
    cores = max(rank.cores for rank in neighbours)
    threads = sum(rank.threads for rank in neighbours if rank.device.kind == "cpu")
    if len(neighbours) > cores:
        yield Finding(
            kind="advice",
            ranks=_numbers(neighbours),
            what=f"{len(neighbours)} ranks on {cores} cores",
            remedy="they take turns; start fewer, or expect each to be slower",
        )
    elif threads > cores and len(neighbours) > 1:
        yield Finding(
            kind="advice",
            ranks=_numbers(neighbours),
            what=f"{threads} threads of torch on {cores} cores",
            remedy=f"they slow each other down, by far; set OMP_NUM_THREADS="
            f"{cores // len(neighbours)}",
        )


def _shared_memory_suffices(neighbours: Sequence[RankFacts]) -> Iterator[Finding]:
    free = [rank.shared_memory_bytes[0] for rank in neighbours if rank.shared_memory_bytes]
    needed = _SMALL_SHARED_MEMORY * len(neighbours)
    if not free or min(free) < needed:
        there = f"{size(min(free))} free in /dev/shm" if free else "no /dev/shm"
        yield Finding(
            kind="advice",
            ranks=_numbers(neighbours),
            what=f"{there}, {size(needed)} expected for {len(neighbours)} ranks",
            remedy="DataLoader workers and same-host transports use it; start the container with "
            "--shm-size=8g or --ipc=host",
        )


def _devices_are_free_and_fast(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for rank in ranks:
        device = rank.device
        if device.throttled:
            yield Finding(
                kind="advice",
                ranks=(rank.rank,),
                what=f"{device.name} runs below its clocks: {device.throttled}",
                remedy="see to its cooling and power; what is measured now is not its speed",
            )
        if device.kind == "cuda" and device.others_bytes > device.total_bytes // 10:
            yield Finding(
                kind="advice",
                ranks=(rank.rank,),
                what=f"others hold {size(device.others_bytes)} of the "
                f"{size(device.total_bytes)} of {device.name}",
                remedy="nvidia-smi names them; plans use only what is left",
            )
        narrowed = [link for link in device.links if "(of x" in link]
        if narrowed:
            yield Finding(
                kind="advice",
                ranks=(rank.rank,),
                what=f"{device.name} is linked by {narrowed[0]}",
                remedy="another slot, or other cards beside it, may give it all its lanes",
            )


def _fast_operators_serve(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [rank for rank in ranks if not rank.native_operators]
    if without:
        yield Finding(
            kind="advice",
            ranks=_numbers(without),
            what=without[0].operators,
            remedy="plain PyTorch gives the same bits more slowly; build the operators (see "
            "CONTRIBUTING.md)",
        )


_CHECKS: tuple[Callable[[Sequence[RankFacts]], Iterator[Finding]], ...] = (
    _versions_are_equal,
    _devices_are_of_one_kind,
    _a_transport_serves,
    _torch_has_their_kernels,
    _each_has_its_own_device,
    _hosts_find_each_other,
    _all_multiply_bf16,
    _hosts_have_room,
    _devices_are_free_and_fast,
    _fast_operators_serve,
)


def _odd_ones(
    ranks: Sequence[RankFacts], values: Sequence[str], kind: str, what: str, remedy: str
) -> Iterator[Finding]:
    """One finding if the ranks do not all have the same value: who has which."""
    groups = grouped(ranks, values)
    if len(groups) > 1:
        yield Finding(
            kind=kind,
            ranks=_numbers(ranks),
            what=f"{what} differs: {listed(groups)}",
            remedy=remedy,
        )


def _numbers(ranks: Iterable[RankFacts]) -> tuple[int, ...]:
    return tuple(rank.rank for rank in ranks)

"""The checks of the doctor, one per cause of trouble: facts of all ranks in, findings out."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from poplar.doctor.facts import RankFacts, describe_values
from poplar.values.formatting import format_bytes, format_ranks

_SMALL_SHARED_MEMORY = 64 << 20
"""Bytes per rank; 64 MiB is the default of containers for all processes together."""

_MUST_BE_EQUAL = {
    "poplar": "install one version on all of them",
    "torch": "install one version on all of them",
    "NCCL": "install one version; different ones hang or fail in the first collective",
}
_SHOULD_BE_EQUAL = {
    "CUDA": "works if NCCL is the same; old and new GPUs may need different builds of torch",
    "driver": "works if each driver is new enough for torch's CUDA; update the older one",
    "python": "works; objects pickled by one version (datasets, checkpoints) may fail in another",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found, on which ranks, and what to do."""

    kind: str
    """`"problem"` or `"advice"`."""
    ranks: tuple[int, ...]
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.kind}: {format_ranks(self.ranks)}: {self.what}; {self.fix}"


def findings(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """All findings about the ranks of a job, problems first."""
    found = itertools.chain.from_iterable(check(ranks) for check in _CHECKS)
    yield from sorted(found, key=lambda finding: finding.kind != "problem")


def _versions_are_equal(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for kind, versions in (("problem", _MUST_BE_EQUAL), ("advice", _SHOULD_BE_EQUAL)):
        for name, fix in versions.items():
            # "2.13.0+cu126" and "2.13.0+cu130" are two builds of one version.
            values = [rank.versions.get(name, "none").partition("+")[0] for rank in ranks]
            yield from _differences(ranks, values, kind, name, fix)


def _device_types_are_equal(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    types = [rank.device.kind for rank in ranks]
    fix = "give every rank a CPU, or every rank a CUDA device"
    yield from _differences(ranks, types, "problem", "device type", fix)
    machines = [rank.machine for rank in ranks]
    fix = "works; results may differ in the last bits from a run on one architecture"
    yield from _differences(ranks, machines, "advice", "architecture", fix)


def _all_support_bf16(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [rank for rank in ranks if "bfloat16" not in rank.dtypes]
    if without:
        names = ", ".join(sorted({rank.device.name for rank in without}))
        yield _advice(
            without,
            f"no bfloat16 ({names})",
            'compute_dtype="auto" uses float16 with one loss scale on all ranks, also on those '
            "with bfloat16; compute_dtype=torch.bfloat16 is an error",
        )


def _torch_has_kernels_for_each_device(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for rank in ranks:
        if rank.device.capability is None or not rank.architectures:
            continue
        if not _has_kernels(rank.device.capability, rank.architectures):
            major, minor = rank.device.capability
            yield _problem(
                [rank],
                f"torch {rank.versions['torch']} has no kernels for {rank.device.name} "
                f"(sm_{major}{minor}; only {', '.join(rank.architectures)})",
                _build_for(rank.device.capability),
            )


def _build_for(capability: tuple[int, int]) -> str:
    """Which build of torch to install; CUDA 13 has no compiler for chips before Turing."""
    if capability < (7, 5):
        return (
            "builds of torch for CUDA 13 have no kernels for GPUs before Turing, such as the V100; "
            "install the cu126 build of the same torch version on its host"
        )
    return "install a build of torch for another CUDA version"


def _has_kernels(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Binary code runs on later minor versions of its major version; PTX on all later ones."""
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")  # suffix: one architecture only, or one family
        if not digits.isdigit():
            continue
        built_for = divmod(int(digits), 10)
        if kind == "compute" and built_for <= capability:
            return True
        if kind == "sm" and built_for[0] == capability[0] and built_for[1] <= capability[1]:
            return True
    return False


def _devices_are_not_shared(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    together = defaultdict(list)
    for rank in ranks:
        if rank.device.uuid:
            together[rank.device.uuid].append(rank)
    for sharers in together.values():
        if len(sharers) > 1:
            what = f"share one device, {sharers[0].device.name}"
            if all(rank.may_share_device for rank in sharers):
                fix = "pass each rank its part of the memory as memory_limit="
                yield _advice(sharers, what, fix)
            else:
                fix = "start one rank per device of the host, and check CUDA_VISIBLE_DEVICES"
                yield _problem(sharers, what, fix)


def _a_transport_exists(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [rank for rank in ranks if rank.transport.startswith("none")]
    if without:
        yield _problem(
            without,
            f"no transport ({without[0].transport})",
            "install a build of torch with torch.distributed",
        )


def _hosts_can_be_reached(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    nodes = defaultdict(set)
    for rank in ranks:
        nodes[rank.device.host].add(rank.node)
    for name, several in nodes.items():
        if len(several) > 1:
            yield _problem(
                [rank for rank in ranks if rank.device.host == name],
                f"{len(several)} nodes have the same host name {name!r}",
                "give each host a unique name; ranks with one host name count as one host",
            )
    if len({rank.node for rank in ranks}) == 1:
        return
    unreachable = [rank for rank in ranks if _is_loopback(rank.address) and not rank.interface]
    if unreachable:
        names = ", ".join(sorted({rank.device.host for rank in unreachable}))
        yield _problem(
            unreachable,
            f"the host name ({names}) resolves to a loopback address or not at all, so other hosts "
            "cannot connect",
            "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface "
            "between the hosts, or correct /etc/hosts",
        )


def _is_loopback(address: str) -> bool:
    return not address or address.startswith("127.")


def _hosts_have_resources(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    by_host = defaultdict(list)
    for rank in ranks:
        by_host[(rank.node, rank.device.host)].append(rank)
    for on_host in by_host.values():
        yield from _shared_memory_suffices(on_host)
        yield from _cores_suffice(on_host)


def _cores_suffice(on_host: Sequence[RankFacts]) -> Iterator[Finding]:
    cores = max(rank.cores for rank in on_host)
    threads = sum(rank.threads for rank in on_host if rank.device.kind == "cpu")
    if len(on_host) > cores:
        yield _advice(
            on_host,
            f"{len(on_host)} ranks on {cores} cores",
            "start fewer ranks; ranks that share a core slow each other down",
        )
    elif threads > cores and len(on_host) > 1:
        yield _advice(
            on_host,
            f"{threads} threads of torch on {cores} cores",
            f"they slow each other down considerably; set OMP_NUM_THREADS={cores // len(on_host)}",
        )


def _shared_memory_suffices(on_host: Sequence[RankFacts]) -> Iterator[Finding]:
    free = [rank.shared_memory_bytes[0] for rank in on_host if rank.shared_memory_bytes]
    needed = _SMALL_SHARED_MEMORY * len(on_host)
    if not free or min(free) < needed:
        there = f"{format_bytes(min(free))} free in /dev/shm" if free else "no /dev/shm"
        yield _advice(
            on_host,
            f"{there}, {format_bytes(needed)} expected for {len(on_host)} ranks",
            "DataLoader workers need it; start the container with --shm-size=8g or --ipc=host",
        )


def _devices_run_at_full_speed(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for rank in ranks:
        device = rank.device
        if device.throttled:
            yield _advice(
                [rank],
                f"{device.name} runs below its clock rate: {device.throttled}",
                "check cooling and power limits before profiling",
            )
        if device.kind == "cuda" and device.others_bytes > device.total_bytes // 10:
            yield _advice(
                [rank],
                f"other processes hold {format_bytes(device.others_bytes)} of the "
                f"{format_bytes(device.total_bytes)} of {device.name}",
                "nvidia-smi lists them; plans use only the rest",
            )
        narrowed = [link for link in device.links if "(of x" in link]
        if narrowed:
            yield _advice(
                [rank],
                f"{device.name} is connected by {narrowed[0]}",
                "another slot may provide all lanes",
            )


def _fast_operators_are_available(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [rank for rank in ranks if not rank.native_operators]
    if without:
        yield _advice(
            without,
            without[0].operators,
            "plain PyTorch computes the same values more slowly; build the operators (see "
            "CONTRIBUTING.md)",
        )


_CHECKS: tuple[Callable[[Sequence[RankFacts]], Iterator[Finding]], ...] = (
    _versions_are_equal,
    _device_types_are_equal,
    _a_transport_exists,
    _torch_has_kernels_for_each_device,
    _devices_are_not_shared,
    _hosts_can_be_reached,
    _all_support_bf16,
    _hosts_have_resources,
    _devices_run_at_full_speed,
    _fast_operators_are_available,
)


def _differences(
    ranks: Sequence[RankFacts], values: Sequence[str], kind: str, what: str, fix: str
) -> Iterator[Finding]:
    """One finding that lists the ranks of each value, if the values differ."""
    if len(set(values)) > 1:
        yield _finding(kind, ranks, f"{what} differs: {describe_values(ranks, values)}", fix)


def _problem(ranks: Iterable[RankFacts], what: str, fix: str) -> Finding:
    return _finding("problem", ranks, what, fix)


def _advice(ranks: Iterable[RankFacts], what: str, fix: str) -> Finding:
    return _finding("advice", ranks, what, fix)


def _finding(kind: str, ranks: Iterable[RankFacts], what: str, fix: str) -> Finding:
    return Finding(kind=kind, ranks=tuple(rank.rank for rank in ranks), what=what, fix=fix)

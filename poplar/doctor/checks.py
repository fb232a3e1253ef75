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


def _ranks_alone(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """What is found about a rank without the others; ranks with the same text share a finding."""
    found: dict[tuple[str, str, str], list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        for kind_what_fix in _about(rank):
            found[kind_what_fix].append(rank)
    for (kind, what, fix), members in found.items():
        yield _finding(kind, members, what, fix)


def _about(rank: RankFacts) -> Iterator[tuple[str, str, str]]:
    """The kind of finding, what was found, and what to do."""
    device, capability = rank.device, rank.device.capability
    if rank.transport.startswith("none"):
        fix = "install a build of torch with torch.distributed"
        yield "problem", f"no transport ({rank.transport})", fix
    if capability and rank.architectures and not _has_kernels(capability, rank.architectures):
        yield (
            "problem",
            f"torch {rank.versions['torch']} has no kernels for {device.name} "
            f"(sm_{capability[0]}{capability[1]}; only {', '.join(rank.architectures)})",
            _build_for(capability),
        )
    if "bfloat16" not in rank.dtypes:
        yield (
            "advice",
            f"no bfloat16 ({device.name})",
            'compute_dtype="auto" uses float16 with one loss scale on all ranks, also on those '
            "with bfloat16; compute_dtype=torch.bfloat16 is an error",
        )
    if device.throttled:
        what = f"{device.name} runs below its clock rate: {device.throttled}"
        yield "advice", what, "check cooling and power limits before profiling"
    if device.kind == "cuda" and device.others_bytes > device.total_bytes // 10:
        yield (
            "advice",
            f"other processes hold {format_bytes(device.others_bytes)} of the "
            f"{format_bytes(device.total_bytes)} of {device.name}",
            "nvidia-smi lists them; plans use only the rest",
        )
    for link in [link for link in device.links if "(of x" in link][:1]:
        what = f"{device.name} is connected by {link}"
        yield "advice", what, "another slot may provide all lanes"
    if not rank.native_operators:
        fix = "plain PyTorch computes the same values more slowly; build the operators (see "
        yield "advice", rank.operators, fix + "CONTRIBUTING.md)"


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
    unreachable = [
        rank
        for rank in ranks
        if not rank.interface and (not rank.address or rank.address.startswith("127."))
    ]
    if unreachable:
        names = ", ".join(sorted({rank.device.host for rank in unreachable}))
        yield _problem(
            unreachable,
            f"the host name ({names}) resolves to a loopback address or not at all, so other hosts "
            "cannot connect",
            "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface "
            "between the hosts, or correct /etc/hosts",
        )


def _hosts_have_resources(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    by_host = defaultdict(list)
    for rank in ranks:
        by_host[(rank.node, rank.device.host)].append(rank)
    for on_host in by_host.values():
        free = [rank.shared_memory_bytes[0] for rank in on_host if rank.shared_memory_bytes]
        needed = _SMALL_SHARED_MEMORY * len(on_host)
        if not free or min(free) < needed:
            there = f"{format_bytes(min(free))} free in /dev/shm" if free else "no /dev/shm"
            yield _advice(
                on_host,
                f"{there}, {format_bytes(needed)} expected for {len(on_host)} ranks",
                "DataLoader workers need it; start the container with --shm-size=8g or --ipc=host",
            )
        cores = max(rank.cores for rank in on_host)
        threads = sum(rank.threads for rank in on_host if rank.device.kind == "cpu")
        if len(on_host) > cores:
            fix = "start fewer ranks; ranks that share a core slow each other down"
            yield _advice(on_host, f"{len(on_host)} ranks on {cores} cores", fix)
        elif threads > cores and len(on_host) > 1:
            yield _advice(
                on_host,
                f"{threads} threads of torch on {cores} cores",
                "they slow each other down considerably; set "
                f"OMP_NUM_THREADS={cores // len(on_host)}",
            )


_CHECKS: tuple[Callable[[Sequence[RankFacts]], Iterator[Finding]], ...] = (
    _versions_are_equal,
    _device_types_are_equal,
    _ranks_alone,
    _devices_are_not_shared,
    _hosts_can_be_reached,
    _hosts_have_resources,
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

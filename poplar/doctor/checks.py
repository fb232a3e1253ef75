"""The checks of the doctor, one per cause of trouble: facts of all ranks in, findings out."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import reduce

from poplar.doctor.architectures import build_for
from poplar.doctor.connections import (
    all_gpus_are_examined,
    by_host,
    gpus_read_each_other,
    host_names_differ,
    hosts_can_be_reached,
    shared_memory_is_large,
)
from poplar.doctor.facts import RankFacts, describe_values
from poplar.doctor.finding import Finding, advice, problem
from poplar.system.cuda_architectures import has_kernels
from poplar.values.formatting import format_bytes, format_ranks

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


def findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """All findings about the ranks of a job, problems first; ranks with equal ones share one."""
    of_ranks: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for found in itertools.chain.from_iterable(check(ranks) for check in _CHECKS):
        of_ranks[found.kind, found.what, found.fix].update(found.ranks)
    merged = [
        Finding(kind=kind, ranks=tuple(sorted(numbers)), what=what, fix=fix)
        for (kind, what, fix), numbers in of_ranks.items()
    ]
    return sorted(merged, key=lambda found: found.kind != "problem")


def _versions_are_equal(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for finding, versions in ((problem, _MUST_BE_EQUAL), (advice, _SHOULD_BE_EQUAL)):
        for name, fix in versions.items():
            # "2.13.0+cu126" and "2.13.0+cu130" are two builds of one version.
            values = [rank.versions.get(name, "none").partition("+")[0] for rank in ranks]
            yield from _differences(finding, ranks, values, name, fix)


def _device_types_are_equal(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    types = [rank.device.kind for rank in ranks]
    fix = "give every rank a CPU, or every rank a CUDA device"
    yield from _differences(problem, ranks, types, "device type", fix)
    machines = [rank.machine for rank in ranks]
    fix = "works; results may differ in the last bits from a run on one architecture"
    yield from _differences(advice, ranks, machines, "architecture", fix)


def _about(rank: RankFacts) -> Iterator[Finding]:
    """What is found about a rank without the others."""
    device = rank.device
    if rank.transport.startswith("none"):
        fix = "install a build of torch with torch.distributed"
        yield problem([rank], f"no transport ({rank.transport})", fix)
    if rank.operators_problem is not None:
        yield problem([rank], *rank.operators_problem)
    if device.throttled:
        what = f"{device.name} runs below its clock rate: {device.throttled}"
        yield advice([rank], what, "check cooling and power limits before profiling")
    if device.kind == "cuda" and device.others_bytes > device.total_bytes // 10:
        yield advice(
            [rank],
            f"other processes hold {format_bytes(device.others_bytes)} of the "
            f"{format_bytes(device.total_bytes)} of {device.name}",
            "nvidia-smi lists them; plans use only the rest",
        )
    for link in [link for link in device.links if "(of x" in link][:1]:
        what = f"{device.name} is connected by {link}"
        yield advice([rank], what, "another slot may provide all lanes")
    if not rank.native_operators:
        fix = "plain PyTorch computes the same values more slowly; build the operators (see "
        yield advice([rank], rank.operators, fix + "CONTRIBUTING.md)")


def _torch_has_kernels(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    capabilities = {rank.device.capability for rank in ranks if rank.device.capability}
    for rank in ranks:
        capability = rank.device.capability
        if not capability or not rank.architectures:
            continue
        if not has_kernels(capability, rank.architectures):
            what = (
                f"torch {rank.versions['torch']} has no kernels for {rank.device.name} "
                f"(sm_{capability[0]}{capability[1]}; only {', '.join(rank.architectures)})"
            )
            yield problem([rank], what, build_for(capability, capabilities))


def _all_have_bf16(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [rank for rank in ranks if "bfloat16" not in rank.dtypes]
    if not without:
        return
    names = ", ".join(sorted({rank.device.name for rank in without}))
    others = [rank.rank for rank in ranks if rank not in without]
    also = f", also on {format_ranks(others)}, which would have bfloat16" if others else ""
    yield advice(
        without,
        f"no bfloat16 ({names})",
        f'compute_dtype="auto" uses float16 with one loss scale on all ranks{also}; '
        "compute_dtype=torch.bfloat16 is an error",
    )


def _devices_are_not_shared(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    together = defaultdict(list)
    for rank in ranks:
        if rank.device.uuid:
            together[rank.device.uuid].append(rank)
    for sharers in together.values():
        if len(sharers) > 1:
            what = f"share one device, {sharers[0].device.name}"
            if all(rank.settings.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" for rank in sharers):
                fix = "pass each rank its part of the memory as memory_limit="
                yield advice(sharers, what, fix)
            else:
                fix = "start one rank per device of the host, and check CUDA_VISIBLE_DEVICES"
                yield problem(sharers, what, fix)


def _cores_suffice(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for on_host in by_host(ranks):
        cores = _usable_cores(on_host)
        threads = sum(rank.threads for rank in on_host if rank.device.kind == "cpu")
        if len(on_host) > cores:
            fix = "start fewer ranks; ranks that share a core slow each other down"
            yield advice(on_host, f"{len(on_host)} ranks on {cores:.4g} cores", fix)
        elif threads > cores:
            yield advice(
                on_host,
                f"{threads} threads of torch on {cores:.4g} cores",
                "they slow each other down considerably; set "
                f"OMP_NUM_THREADS={int(cores) // len(on_host)}",
            )


def _usable_cores(on_host: Sequence[RankFacts]) -> float:
    """Cores that the ranks of a host can use together, by affinity and CPU quotas; at least 1."""
    mask = reduce(operator.or_, (int(rank.affinity, 16) for rank in on_host))
    cores = max(mask.bit_count(), *(rank.cores for rank in on_host))
    quotas = [rank.cpu_quota for rank in on_host if rank.cpu_quota is not None]
    if len(quotas) < len(on_host):
        return cores
    # Ranks of one control group share its quota.
    return max(1.0, min(cores, sum(quota for _, quota in set(quotas))))


def _windows_limits(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """What differs in WSL2. Its kernels are named "5.15.167.4-microsoft-standard-WSL2"."""
    inside = [rank for rank in ranks if "microsoft" in rank.kernel.lower()]
    if inside:
        yield advice(
            inside,
            f"Linux runs in WSL2 (kernel {inside[0].kernel})",
            "pinned host memory is limited there: if an allocation fails although memory is free, "
            "use pin_memory=False; ranks share the memory that .wslconfig allows (half of the "
            "machine's by default); if NCCL hangs at the start, set NCCL_P2P_DISABLE=1",
        )


_CHECKS: tuple[Callable[[Sequence[RankFacts]], Iterator[Finding]], ...] = (
    _versions_are_equal,
    _device_types_are_equal,
    _torch_has_kernels,
    _all_have_bf16,
    lambda ranks: itertools.chain.from_iterable(map(_about, ranks)),
    _devices_are_not_shared,
    all_gpus_are_examined,
    gpus_read_each_other,
    host_names_differ,
    hosts_can_be_reached,
    shared_memory_is_large,
    _cores_suffice,
    _windows_limits,
)


def _differences(
    finding: Callable[[Sequence[RankFacts], str, str], Finding],
    ranks: Sequence[RankFacts],
    values: Sequence[str],
    what: str,
    fix: str,
) -> Iterator[Finding]:
    """One finding that lists the ranks of each value, if the values differ."""
    if len(set(values)) > 1:
        yield finding(ranks, f"{what} differs: {describe_values(ranks, values)}", fix)

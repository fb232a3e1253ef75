"""Unequal ranks on one machine: one process per rank, slowed down by the operating system.

By CPU quota (cgroup v1 `cpu.cfs_quota_us` or v2 `cpu.max`): a rank with 0.5 gets half of every
10 ms of a core, independent of other ranks and before other programs. Predictions are judged under
quotas. Or by core sharing: the busy ranks of a core share it, so a rank that waits makes the others
faster. Either way, cores do not enter idle states (`idle_states.py`).

    with cpu_quotas((0.8, 0.4, 0.2)) as ranks:
        run_ranks(work, 3, ranks)          # work calls ranks.enter(dist.get_rank()) first

A guard process (this file as a program) removes the control groups at the end of the `with` block,
or when this process is killed. `measured_speeds` measures what quotas really do.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from idle_states import prevent_idle_states

SELF = Path("/proc/self")
"""What the kernel says about this process."""
PERIOD_US = 10_000
"""Microseconds after which a quota is refilled. A rank that has used its quota stops until then, so
shorter periods are smoother; the kernel's minimum is 1 ms."""
LEAST_QUOTA_US = 1_000
"""The kernel's minimum."""
REMOVAL_SECONDS = 5.0
"""How long a group may stay busy after its last process has exited."""


class EmulationUnavailable(RuntimeError):
    """This machine does not allow limits on processes; the message says why and what is needed."""


@dataclass(frozen=True)
class Version1:
    """A control group of cgroup v1, whose `cpu` controller has a tree of its own."""

    parent: Path
    """Below it, groups with a CPU quota can be created."""

    def make(self, name: str, quota_us: int) -> Path:
        """Create a group with a quota, without processes."""
        group = self.parent / name
        group.mkdir()
        try:
            self.limit(group, quota_us)
        except OSError:
            group.rmdir()
            raise
        return group

    def limit(self, group: Path, quota_us: int) -> None:
        """Set a group's quota per period, and the kernel's largest weight."""
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cpu.shares").write_text("262144")


class Version2(Version1):
    """cgroup v2: one tree; a group can have a quota if its parent delegates the controller."""

    def make(self, name: str, quota_us: int) -> Path:
        delegated = self.parent / "cgroup.subtree_control"
        if "cpu" not in delegated.read_text().split():
            delegated.write_text("+cpu")
        return super().make(name, quota_us)

    def limit(self, group: Path, quota_us: int) -> None:
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        (group / "cpu.weight").write_text("10000")


def find_hierarchy() -> Version1:
    """Where this process may create groups with a quota: below its own group if possible.

    Raises:
        EmulationUnavailable: nowhere; the message lists what was tried.
    """
    tried = []
    for hierarchy in _candidates():
        try:
            hierarchy.make(_group_name(rank=0), PERIOD_US).rmdir()
        except OSError as error:
            tried.append(f"{hierarchy.parent}: {error.strerror}")
        else:
            return hierarchy
    raise EmulationUnavailable(
        "CPU quotas need a writable cgroup with the cpu controller (root in most containers, or a "
        "delegated group: systemd-run --user --scope -p Delegate=yes ...); "
        f"{'; '.join(tried) or 'no cgroup tree with it is mounted'}. core_sharing needs no rights"
    )


def _candidates() -> Iterator[Version1]:
    """Own group first, then its ancestors: in v2, a group with processes cannot delegate quotas."""
    own: dict[str, str] = {}
    """This process's group by controller; v2 has the empty name."""
    for line in (SELF / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    for line in (SELF / "mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        mount = Path(point)
        if kind == "cgroup" and "cpu" in options.split(","):
            yield from map(Version1, _ancestors(mount, own.get("cpu", "/")))
        elif kind == "cgroup2" and "cpu" in _controllers(mount):
            yield from map(Version2, _ancestors(mount, own.get("", "/")))


def _controllers(mount: Path) -> list[str]:
    """The controllers of a tree of cgroup v2; none if they cannot be read."""
    with suppress(OSError):
        return (mount / "cgroup.controllers").read_text().split()
    return []


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a group and of each visible ancestor."""
    folder = mount / path.lstrip("/")
    while True:
        if folder.is_dir():  # in a container, the path may exist only on the host
            yield folder
        if folder == mount:
            return
        folder = folder.parent


@dataclass(frozen=True)
class QuotaPlacement:
    """A control group with a quota, in which a rank runs."""

    hierarchy: Version1
    group: Path

    def apply(self) -> None:
        """Move the calling process here, with all its threads."""
        (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def change(self, fraction: float) -> None:
        """Give the processes of this group another fraction of a core."""
        self.hierarchy.limit(self.group, round(fraction * PERIOD_US))


@dataclass(frozen=True)
class CorePlacement:
    """A core that other ranks may share."""

    core: int

    def apply(self) -> None:
        """Move the calling process here, with all its threads."""
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), {self.core})


@dataclass(frozen=True)
class Ranks:
    """A placement for each rank. A small picklable value to pass to the rank processes."""

    placements: tuple[QuotaPlacement, ...] | tuple[CorePlacement, ...]

    def enter(self, rank: int) -> None:
        """Apply the speed of `rank` to the calling process. Call it first."""
        self.placements[rank].apply()

    def change(self, rank: int, fraction: float) -> None:
        """Give `rank`, which has a quota, another fraction of a core, from any process."""
        self.placements[rank].change(fraction)


@contextmanager
def cpu_quotas(fractions: Sequence[float]) -> Iterator[Ranks]:
    """Ranks that get a fraction of a core each, independent of the others.

    Raises:
        ValueError: no fractions, one that is too small for the kernel, or a sum above the number of
            cores of this process.
        EmulationUnavailable: this process may not create quotas.
    """
    for rank, fraction in enumerate(fractions):
        if not fraction * PERIOD_US >= LEAST_QUOTA_US:  # NaN too
            raise ValueError(
                f"rank {rank}: {fraction} of a core is a quota of {fraction * PERIOD_US:g} us in a "
                f"period of {PERIOD_US} us; the kernel's minimum is {LEAST_QUOTA_US} us"
            )
    cores = len(os.sched_getaffinity(0))
    if not fractions or sum(fractions) > cores * (1 + 1e-9):
        raise ValueError(
            f"fractions {tuple(fractions)} sum to {sum(fractions):g} cores, and this process may "
            f"use {cores}"
        )
    hierarchy = find_hierarchy()
    groups = [hierarchy.parent / _group_name(rank) for rank in range(len(fractions))]
    with prevent_idle_states(), guard(__file__, map(str, groups)):
        for group, fraction in zip(groups, fractions, strict=True):
            hierarchy.make(group.name, round(fraction * PERIOD_US))
        yield Ranks(tuple(QuotaPlacement(hierarchy, group) for group in groups))


@contextmanager
def core_sharing(cores: Sequence[int]) -> Iterator[Ranks]:
    """Ranks bound to cores: `(0, 1, 1, 1)` is one rank three times as fast as the others."""
    with prevent_idle_states():
        yield Ranks(tuple(map(CorePlacement, cores)))


def quotas_of(speeds: Sequence[float], fastest: float) -> tuple[float, ...]:
    """Fractions of a core in proportion to speeds.

    The fastest rank gets `fastest` of a core, or less if this process has too few cores.
    """
    relative = [speed / max(speeds) for speed in speeds]
    scale = fastest * min(1.0, len(os.sched_getaffinity(0)) / sum(relative))
    return tuple(scale * speed for speed in relative)


def remove(groups: Sequence[Path]) -> None:
    """Move remaining processes to the parent group, then remove the groups."""
    deadline = time.monotonic() + REMOVAL_SECONDS
    for group in groups:
        while group.exists():
            with suppress(OSError):
                _evict(group)
                group.rmdir()
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)


def _evict(group: Path) -> None:
    for process in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):  # it has ended
            (group.parent / "cgroup.procs").write_text(process)


def _group_name(rank: int) -> str:
    return f"poplar-emulation-{secrets.token_hex(4)}-rank{rank}"


@contextmanager
def guard(program: str, names: Iterable[str]) -> Iterator[None]:
    """Remove what has these names at the end of the `with` block, or when this process is killed.

    A program with the names as arguments does it when its input is closed.
    """
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", program, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # not affected by Ctrl-C
    )
    try:
        yield
    finally:
        process.communicate()


def spin(seconds: float) -> float:
    """Rounds per second of an empty loop: this process's speed."""
    rounds = 0
    start = time.perf_counter()
    while True:
        for _ in range(1000):
            rounds += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return rounds / elapsed


def measured_speeds() -> tuple[float, ...]:
    """Measured speeds of the ranks relative to the fastest. Collective; call it in the cluster."""
    import torch.distributed as dist  # not in the guard

    dist.barrier()
    mine = spin(1.0)
    speeds: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(speeds, mine)
    return tuple(speed / max(speeds) for speed in speeds)


if __name__ == "__main__":  # the guard
    sys.stdin.buffer.read()  # returns when the parent process ends
    remove([Path(name) for name in sys.argv[1:]])

"""Unequal ranks on one machine: one process per rank, slowed down by the operating system.

By CPU quota (cgroup v1 `cpu.cfs_quota_us` or v2 `cpu.max`): a rank with 0.5 gets half of every
10 ms of a core, independent of other ranks and before other programs. Predictions are judged under
quotas. Or by core sharing: the busy ranks of a core share it, so a rank that waits makes the others
faster. Either way, cores do not enter idle states (`idle_states.py`).

    with EmulatedCluster.quotas((0.8, 0.4, 0.2)) as ranks:
        run_ranks(work, 3, ranks)          # work calls ranks.enter(dist.get_rank()) first

The control groups are removed at the end of the `with` block, by a guard process if this process is
killed (this file as a program), and by the next run if both are killed. `measured_speeds` measures
what quotas really do.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from idle_states import prevent_idle_states

if TYPE_CHECKING:
    import torch.distributed as dist

PERIOD_US = 10_000
"""Microseconds after which a quota is refilled. A rank that has used its quota stops until then, so
shorter periods are smoother; the kernel's minimum is 1 ms."""
LEAST_QUOTA_US = 1_000
"""The kernel's minimum."""
REMOVAL_SECONDS = 5.0
"""How long a group may stay busy after its last process has exited."""

_SERIAL = itertools.count()
_NAME = re.compile(r"poplar-emulation-(?P<space>\d+)-(?P<pid>\d+)-(?P<start>\d+)-\d+-rank\d+")


class EmulationUnavailable(RuntimeError):
    """This machine does not allow limits on processes; the message says why and what is needed."""


@dataclass(frozen=True)
class Hierarchy(ABC):
    """A control group in which groups with a CPU quota can be created."""

    parent: Path

    def make(self, name: str, quota_us: int, period_us: int) -> Path:
        """Create a group with a quota, without processes."""
        group = self.parent / name
        group.mkdir()
        try:
            self.limit(group, quota_us, period_us)
        except OSError:
            group.rmdir()
            raise
        return group

    @abstractmethod
    def limit(self, group: Path, quota_us: int, period_us: int) -> None:
        """Set a group's quota per period, and the kernel's largest weight."""


class Version1(Hierarchy):
    """cgroup v1: the `cpu` controller has a tree of its own."""

    def limit(self, group: Path, quota_us: int, period_us: int) -> None:
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cpu.shares").write_text("262144")


class Version2(Hierarchy):
    """cgroup v2: one tree; a group can have a quota if its parent delegates the controller."""

    def make(self, name: str, quota_us: int, period_us: int) -> Path:
        delegated = self.parent / "cgroup.subtree_control"
        if "cpu" not in _read_words(delegated):
            delegated.write_text("+cpu")
        return super().make(name, quota_us, period_us)

    def limit(self, group: Path, quota_us: int, period_us: int) -> None:
        (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        (group / "cpu.weight").write_text("10000")


def find_hierarchy(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Hierarchy:
    """Where this process may create groups with a quota: below its own group if possible.

    Args:
        root: where control groups are mounted, if `proc` does not say it.
        proc: the proc file system.

    Raises:
        EmulationUnavailable: nowhere; the message lists what was tried.
    """
    tried = []
    for hierarchy in _candidates(root, proc):
        name = _group_name(rank=0)
        try:
            hierarchy.make(name, PERIOD_US, PERIOD_US).rmdir()
        except OSError as error:
            tried.append(f"{hierarchy.parent}: {error.strerror or error}")
        else:
            return hierarchy
    raise EmulationUnavailable(
        "CPU quotas need a writable cgroup with the cpu controller (root in most containers, or a "
        "delegated group: systemd-run --user --scope -p Delegate=yes ...); "
        f"{'; '.join(tried) or f'no cgroup tree is mounted at {root}'}. "
        "EmulatedCluster.core_sharing needs no rights"
    )


def _candidates(root: Path, proc: Path) -> Iterator[Hierarchy]:
    """Own group first, then its ancestors: in v2, a group with processes cannot delegate quotas."""
    own = _own_groups(proc)
    for mount, kind, options in _mounts(proc) or [(root, "cgroup2", set())]:
        if kind == "cgroup" and "cpu" in options:
            yield from map(Version1, _ancestors(mount, own.get("cpu", "/")))
        elif kind == "cgroup2" and "cpu" in _read_words(mount / "cgroup.controllers"):
            yield from map(Version2, _ancestors(mount, own.get("", "/")))


def _read_words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _mounts(proc: Path) -> list[tuple[Path, str, set[str]]]:
    """Mount point, kind and options of every cgroup tree."""
    found = []
    with suppress(OSError):
        for line in (proc / "self/mounts").read_text().splitlines():
            _, point, kind, options, *_ = line.split()
            if kind in ("cgroup", "cgroup2"):
                found.append((Path(point), kind, set(options.split(","))))
    return found


def _own_groups(proc: Path) -> dict[str, str]:
    """This process's group by controller; v2 has the empty name."""
    own = {}
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own.update(dict.fromkeys(controllers.split(","), path))
    return own


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a group and of each visible ancestor."""
    folder = mount / path.lstrip("/")
    while True:
        if folder.is_dir():  # in a container, the path may exist only on the host
            yield folder
        if folder == mount:
            return
        folder = folder.parent


class Placement(ABC):
    """Where one rank runs, and so how fast it is."""

    @abstractmethod
    def apply(self) -> None:
        """Move the calling process here, with all its threads."""


@dataclass(frozen=True)
class QuotaPlacement(Placement):
    """A control group with a quota."""

    hierarchy: Hierarchy
    group: Path
    period_us: int

    def apply(self) -> None:
        (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def change(self, fraction: float) -> None:
        """Give the processes of this group another fraction of a core."""
        self.hierarchy.limit(self.group, round(fraction * self.period_us), self.period_us)


@dataclass(frozen=True)
class CorePlacement(Placement):
    """A core that other ranks may share."""

    core: int

    def apply(self) -> None:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), {self.core})


@dataclass(frozen=True)
class Ranks:
    """A placement for each rank. A small picklable value to pass to the rank processes."""

    placements: tuple[Placement, ...]

    def enter(self, rank: int) -> None:
        """Apply the speed of `rank` to the calling process. Call it first.

        Raises:
            ValueError: no such rank.
            EmulationUnavailable: the `with` block has ended, or the placement is forbidden.
        """
        if not 0 <= rank < len(self.placements):
            raise ValueError(
                f"rank {rank}: this emulated cluster has ranks 0 to {len(self.placements) - 1}; "
                "start as many ranks as it has speeds"
            )
        try:
            self.placements[rank].apply()
        except OSError as error:
            raise EmulationUnavailable(
                f"rank {rank} could not enter {self.placements[rank]}: {error}; its "
                "EmulatedCluster must still be open in the process that created it"
            ) from error

    def change(self, rank: int, fraction: float) -> None:
        """Give `rank` another fraction of a core from now on, from any process.

        Raises:
            ValueError: the ranks share cores and have no quotas.
        """
        placement = self.placements[rank]
        if not isinstance(placement, QuotaPlacement):
            raise ValueError(f"rank {rank} has no quota; use EmulatedCluster.quotas")
        placement.change(fraction)


class EmulatedCluster(AbstractContextManager[Ranks]):
    """Ranks of unequal speed during the `with` block; create by `quotas` or `core_sharing`."""

    def __init__(
        self, *, cores: Sequence[int] = (), fractions: Sequence[float] = (), period_us: int = 0
    ) -> None:
        self._cores = tuple(cores)
        self._fractions = tuple(fractions)
        self._period_us = period_us
        self._groups: list[Path] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._idle_states = ExitStack()

    @classmethod
    def quotas(cls, fractions: Sequence[float], *, period_us: int = PERIOD_US) -> EmulatedCluster:
        """Ranks that get a fraction of a core each, independent of the others.

        Args:
            fractions: fraction of a core by rank; 0.5 is half as fast as a whole core.
            period_us: microseconds after which a quota is refilled.

        Raises:
            ValueError: a fraction that is not positive or too small for the kernel, or a sum above
                the number of cores of this process.
        """
        for rank, fraction in enumerate(fractions):
            if not fraction * period_us >= LEAST_QUOTA_US:
                raise ValueError(
                    f"rank {rank}: {fraction} of a core is a quota of {fraction * period_us:g} us "
                    f"in a period of {period_us} us; the kernel's minimum is {LEAST_QUOTA_US} us: "
                    "use a larger fraction or a longer period_us"
                )
        cores = len(os.sched_getaffinity(0))
        if not fractions or sum(fractions) > cores * (1 + 1e-9):
            raise ValueError(
                f"fractions {tuple(fractions)} sum to {sum(fractions):g} cores, and this process "
                f"may use {cores}; scale them down, only their proportions matter"
            )
        return cls(fractions=fractions, period_us=period_us)

    @classmethod
    def core_sharing(cls, cores: Sequence[int]) -> EmulatedCluster:
        """Ranks bound to cores: `(0, 1, 1, 1)` is one rank three times as fast as the others.

        Raises:
            ValueError: a core that this process may not use.
        """
        allowed = os.sched_getaffinity(0)
        if not cores or not set(cores) <= allowed:
            raise ValueError(
                f"cores {tuple(cores)}: give one core per rank, out of {sorted(allowed)}, "
                "which this process may use"
            )
        return cls(cores=cores)

    def __enter__(self) -> Ranks:
        try:
            self._idle_states.enter_context(prevent_idle_states())
            placements = self._share_cores() if self._cores else self._limit()
        except BaseException:
            self.close()
            raise
        return Ranks(placements)

    def _share_cores(self) -> tuple[Placement, ...]:
        return tuple(map(CorePlacement, self._cores))

    def _limit(self) -> tuple[Placement, ...]:
        hierarchy = find_hierarchy()
        sweep(hierarchy.parent)
        serial = next(_SERIAL)
        for rank, fraction in enumerate(self._fractions):
            quota_us = round(fraction * self._period_us)
            name = _group_name(rank, serial)
            self._groups.append(hierarchy.make(name, quota_us, self._period_us))
        self._guard = _start_guard(self._groups)
        return tuple(QuotaPlacement(hierarchy, group, self._period_us) for group in self._groups)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the groups; processes in them continue without a quota."""
        remove(self._groups)
        self._groups = []
        if self._guard is not None:
            self._guard.communicate()  # closes its input, which ends it
            self._guard = None
        self._idle_states.close()


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


def sweep(parent: Path) -> None:
    """Remove groups of runs that were killed together with their guard.

    Only empty groups of this PID namespace: processes of other namespaces are not visible.
    """
    for group in parent.glob("poplar-emulation-*"):
        creator = _NAME.fullmatch(group.name)
        if creator is None or int(creator["space"]) != _pid_namespace():
            continue
        if _start_of(int(creator["pid"])) != int(creator["start"]):
            with suppress(OSError):
                group.rmdir()


def _evict(group: Path) -> None:
    for process in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):  # it has ended
            (group.parent / "cgroup.procs").write_text(process)


def _group_name(rank: int, serial: int | None = None) -> str:
    """The name contains the creating process, so that `sweep` knows whether it still runs."""
    serial = next(_SERIAL) if serial is None else serial
    me = os.getpid()
    return f"poplar-emulation-{_pid_namespace()}-{me}-{_start_of(me)}-{serial}-rank{rank}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_of(pid: int) -> int | None:
    """Start time of a process in ticks since boot, since ids are reused; None if not found."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _start_guard(groups: Sequence[Path]) -> subprocess.Popen[bytes]:
    """Start a process that removes the groups when this process ends for any reason."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, *map(str, groups)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # not affected by Ctrl-C
    )


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


def measured_speeds(
    seconds: float = 1.0, group: dist.ProcessGroup | None = None
) -> tuple[float, ...]:
    """Measured speeds of the ranks relative to the fastest. Collective; call it in the cluster.

    Args:
        seconds: how long all ranks spin at once; many periods.
        group: the ranks, on gloo; the default group if None.
    """
    import torch.distributed as dist

    dist.barrier(group)
    mine = spin(seconds)
    speeds: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(speeds, mine, group=group)
    return tuple(speed / max(speeds) for speed in speeds)


if __name__ == "__main__":  # the guard
    sys.stdin.buffer.read()  # returns when the parent process ends
    remove([Path(name) for name in sys.argv[1:]])

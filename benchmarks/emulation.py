"""Unequal ranks on one machine: real processes, each really as slow as asked.

By CPU quota (cgroup v1 `cpu.cfs_quota_us` or v2 `cpu.max`): a rank with 0.5 gets half of every
10 ms of a core, whatever its neighbours do, and gets it before other programs get theirs. That is
what predictions are judged under. Or by core
sharing: ranks on one core divide it among those of them that have something to do, so a rank that
waits makes its neighbours faster. Either way cores stay awake where that is allowed: `awake.py`.

    with EmulatedCluster.quotas((0.8, 0.4, 0.2)) as ranks:
        run_ranks(work, 3, ranks)          # work calls ranks.enter(dist.get_rank()) first

The control groups are this run's own and always go with it: at the end of the `with` block, by a
guard process when this one is killed, and by the next run's sweep when both were. Never believe a
quota, measure it: `measured_speeds`, or

    python benchmarks/emulation.py 1.0 0.5 0.25
"""

from __future__ import annotations

import argparse
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

from awake import awake_cores

if TYPE_CHECKING:
    import torch.distributed as dist

PERIOD_US = 10_000
"""Microseconds after which a quota is filled up again. A rank that has used its own up stands still
until then, so shorter is smoother; the kernel's least is 1 ms."""
LEAST_QUOTA_US = 1_000
"""The kernel refuses less."""
REMOVAL_SECONDS = 5.0
"""How long a group may still be busy after its last process has left."""

_SERIAL = itertools.count()
_NAME = re.compile(r"poplar-emulation-(?P<space>\d+)-(?P<pid>\d+)-(?P<start>\d+)-\d+-rank\d+")


class EmulationUnavailable(RuntimeError):
    """This machine does not let us limit processes; the message says why and what would."""


@dataclass(frozen=True)
class Hierarchy(ABC):
    """A place in the tree of control groups where groups with a CPU quota can be made."""

    parent: Path

    def make(self, name: str, quota_us: int, period_us: int) -> Path:
        """A group of that name and quota, without processes."""
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
        """Give a group its quota per period, and first claim to it: the kernel's largest weight."""


class Version1(Hierarchy):
    """cgroup v1: the `cpu` controller has a tree of its own."""

    def limit(self, group: Path, quota_us: int, period_us: int) -> None:
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cpu.shares").write_text("262144")


class Version2(Hierarchy):
    """cgroup v2: one tree; a group has a quota where its parent hands the controller down."""

    def make(self, name: str, quota_us: int, period_us: int) -> Path:
        handed_down = self.parent / "cgroup.subtree_control"
        if "cpu" not in _words(handed_down):
            handed_down.write_text("+cpu")
        return super().make(name, quota_us, period_us)

    def limit(self, group: Path, quota_us: int, period_us: int) -> None:
        (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        (group / "cpu.weight").write_text("10000")


def find_hierarchy(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Hierarchy:
    """Where this process may make groups with a quota: below its own group if it can be.

    Args:
        root: where control groups are mounted, if `proc` does not say it.
        proc: the kernel's account of mounts and of this process.

    Raises:
        EmulationUnavailable: nowhere; lists what was tried.
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
    """Own group first, then its ancestors: at v2 a group with processes can't hand quotas down."""
    own = _own_groups(proc)
    for mount, kind, options in _mounts(proc) or [(root, "cgroup2", set())]:
        if kind == "cgroup" and "cpu" in options:
            yield from map(Version1, _upwards(mount, own.get("cpu", "/")))
        elif kind == "cgroup2" and "cpu" in _words(mount / "cgroup.controllers"):
            yield from map(Version2, _upwards(mount, own.get("", "/")))


def _words(file: Path) -> list[str]:
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
    """This process's group by controller; the one of v2 under the empty name."""
    own = {}
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own.update(dict.fromkeys(controllers.split(","), path))
    return own


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a group and of each ancestor that this mount shows."""
    folder = mount / path.lstrip("/")
    while True:
        if folder.is_dir():  # inside a container the path may be one that only the host sees
            yield folder
        if folder == mount:
            return
        folder = folder.parent


class Seat(ABC):
    """Where one rank runs."""

    @abstractmethod
    def take(self) -> None:
        """Move the calling process here, all its threads included."""


@dataclass(frozen=True)
class QuotaSeat(Seat):
    """A control group with a quota."""

    group: Path

    def take(self) -> None:
        (self.group / "cgroup.procs").write_text(str(os.getpid()))


@dataclass(frozen=True)
class CoreSeat(Seat):
    """A core, perhaps shared with other ranks."""

    core: int

    def take(self) -> None:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(int(thread.name), {self.core})


@dataclass(frozen=True)
class Ranks:
    """A seat for each rank. A small picklable value: pass it to the rank processes."""

    seats: tuple[Seat, ...]

    def enter(self, rank: int) -> None:
        """Make the calling process as slow as `rank` shall be: the first thing that it does.

        Raises:
            ValueError: no such rank.
            EmulationUnavailable: the seat is gone (the `with` block has ended) or forbidden.
        """
        if not 0 <= rank < len(self.seats):
            raise ValueError(
                f"rank {rank}: this emulated cluster has ranks 0 to {len(self.seats) - 1}; start "
                "as many ranks as it has speeds"
            )
        try:
            self.seats[rank].take()
        except OSError as error:
            raise EmulationUnavailable(
                f"rank {rank} could not enter {self.seats[rank]}: {error}; its EmulatedCluster "
                "must still be open in the process that made it"
            ) from error


class EmulatedCluster(AbstractContextManager[Ranks]):
    """Ranks of unequal speed, as long as its `with` block lasts; `quotas` or `core_sharing`."""

    def __init__(
        self, *, cores: Sequence[int] = (), fractions: Sequence[float] = (), period_us: int = 0
    ) -> None:
        self._cores = tuple(cores)
        self._fractions = tuple(fractions)
        self._period_us = period_us
        self._groups: list[Path] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._awake = ExitStack()

    @classmethod
    def quotas(cls, fractions: Sequence[float], *, period_us: int = PERIOD_US) -> EmulatedCluster:
        """Ranks that get a fraction of a core each, whatever the others do.

        Args:
            fractions: of one core, one per rank; 0.5 is a rank half as fast as one with a core of
                its own.
            period_us: microseconds after which a quota is filled up again.

        Raises:
            ValueError: a fraction that is not positive or too small for the kernel, or all of them
                together more than the cores of this process: then contention would decide.
        """
        for rank, fraction in enumerate(fractions):
            if not fraction * period_us >= LEAST_QUOTA_US:
                raise ValueError(
                    f"rank {rank}: {fraction} of a core is a quota of {fraction * period_us:g} us "
                    f"in a period of {period_us} us; the kernel's least is {LEAST_QUOTA_US} us: "
                    "take a larger fraction or a longer period_us"
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
                f"cores {tuple(cores)}: one per rank, each of {sorted(allowed)}, which are those "
                "that this process may use"
            )
        return cls(cores=cores)

    def __enter__(self) -> Ranks:
        try:
            self._awake.enter_context(awake_cores())
            seats = self._share_cores() if self._cores else self._limit()
        except BaseException:
            self.close()
            raise
        return Ranks(seats)

    def _share_cores(self) -> tuple[Seat, ...]:
        return tuple(map(CoreSeat, self._cores))

    def _limit(self) -> tuple[Seat, ...]:
        hierarchy = find_hierarchy()
        sweep(hierarchy.parent)
        serial = next(_SERIAL)
        for rank, fraction in enumerate(self._fractions):
            quota_us = round(fraction * self._period_us)
            name = _group_name(rank, serial)
            self._groups.append(hierarchy.make(name, quota_us, self._period_us))
        self._guard = _start_guard(self._groups)
        return tuple(map(QuotaSeat, self._groups))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the groups; processes still in them go on without a quota."""
        remove(self._groups)
        self._groups = []
        if self._guard is not None:
            self._guard.communicate()  # closes its input, at which it finds nothing left to do
            self._guard = None
        self._awake.close()


def remove(groups: Sequence[Path]) -> None:
    """Remove groups, after moving the processes that are left in them up to the parent group."""
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
    """Remove what runs that were killed together with their guard have left behind.

    Only empty groups, and only of this PID namespace: of others nobody here knows who lives.
    """
    for group in parent.glob("poplar-emulation-*"):
        made_by = _NAME.fullmatch(group.name)
        if made_by is None or int(made_by["space"]) != _pid_namespace():
            continue
        if _start_of(int(made_by["pid"])) != int(made_by["start"]):
            with suppress(OSError):
                group.rmdir()


def _evict(group: Path) -> None:
    for process in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):  # it has ended since
            (group.parent / "cgroup.procs").write_text(process)


def _group_name(rank: int, serial: int | None = None) -> str:
    """Names its maker, so that a sweep knows whether somebody still wants the group."""
    serial = next(_SERIAL) if serial is None else serial
    me = os.getpid()
    return f"poplar-emulation-{_pid_namespace()}-{me}-{_start_of(me)}-{serial}-rank{rank}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_of(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None if there is none. Ids come again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _start_guard(groups: Sequence[Path]) -> subprocess.Popen[bytes]:
    """A process that removes the groups once this one is gone, however it went."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, "--guard", *map(str, groups)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C and the end of a terminal are not meant for it
    )


def _guard(groups: Sequence[str]) -> None:
    sys.stdin.buffer.read()  # its other end closes with the process that holds it
    remove([Path(group) for group in groups])


def spin(seconds: float) -> float:
    """Rounds per second of a loop that does nothing but compute: this process's speed."""
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
    """What the ranks' speeds really are, the fastest's as 1. Every rank must call it, inside.

    Args:
        seconds: how long to spin, all ranks at once; many periods.
        group: the ranks, on gloo; the default group if None.
    """
    import torch.distributed as dist

    dist.barrier(group)
    mine = spin(seconds)
    speeds: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(speeds, mine, group=group)
    return tuple(speed / max(speeds) for speed in speeds)


def _show_speeds(ranks: Ranks, fractions: Sequence[float], seconds: float) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    ranks.enter(rank)
    speeds = measured_speeds(seconds)
    if rank == 0:
        print("rank  quota  asked  measured")
        for number, (fraction, speed) in enumerate(zip(fractions, speeds, strict=True)):
            asked = fraction / max(fractions)
            print(f"{number:>4}  {fraction:>5.2f}  {asked:>5.2f}  {speed:>8.3f}")


def main() -> None:
    """Show what quotas really do on this machine."""
    parser = argparse.ArgumentParser(
        description="Spin in processes with a CPU quota, and compare speeds with what was asked.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("fractions", type=float, nargs="*", default=[1.0, 0.5], help="of a core")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to spin")
    parser.add_argument("--guard", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.guard:
        _guard(options.guard)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from launch import LaunchError, run_ranks

    try:
        with EmulatedCluster.quotas(options.fractions) as ranks:
            count = len(options.fractions)
            run_ranks(_show_speeds, count, ranks, options.fractions, options.seconds)
    except (EmulationUnavailable, ValueError, LaunchError) as failure:
        print(failure, file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()

"""Ranks have the requested speeds, control groups are removed, and links behave alike anywhere."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import emulation
import idle_states
import network
from emulation import EmulationUnavailable, Ranks, cpu_quotas, quotas_of
from network import Hosts, emulated_network

from poplar.system import host_limits

BENCHMARKS = Path(emulation.__file__).parent


def has_quotas() -> bool:
    try:
        emulation.find_hierarchy()
    except EmulationUnavailable:
        return False
    return True


needs_quotas = pytest.mark.skipif(not has_quotas(), reason="no writable cgroup with a CPU quota")


def enter_and_spin(ranks: Ranks, rank: int) -> float:
    """The used fraction of a core."""
    ranks.enter(rank)
    time.sleep(0.05)  # into a fresh period
    wall, used = time.perf_counter(), time.process_time()
    emulation.spin(0.8)
    return (time.process_time() - used) / (time.perf_counter() - wall)


@needs_quotas
def test_rank_gets_its_quota():
    """No lower bound: other load on the machine may slow down any rank."""
    quotas = (0.4, 0.2)
    with (
        cpu_quotas(quotas) as ranks,
        multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool,
    ):
        pending = [pool.apply_async(enter_and_spin, (ranks, rank)) for rank in (0, 1)]
        for quota, each in zip(quotas, pending, strict=True):
            assert each.get(timeout=60) < quota * 1.06


@needs_quotas
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_groups_are_removed_when_the_run_is_killed(end):
    program = (
        "import sys, time; from emulation import cpu_quotas\n"
        "with cpu_quotas((0.5, 0.5)) as ranks:\n"
        "    print(*(placement.group for placement in ranks.placements), flush=True)\n"
        "    ranks.enter(0)\n"
        "    time.sleep(60)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True
    )
    groups = [Path(name) for name in run.stdout.readline().split()]
    assert len(groups) == 2
    assert all(group.is_dir() for group in groups)
    run.send_signal(end)
    run.wait(timeout=10)
    run.stdout.close()
    deadline = time.monotonic() + 20
    while any(group.exists() for group in groups):
        assert time.monotonic() < deadline, f"still there: {groups}"
        time.sleep(0.05)


needs_no_quota = pytest.mark.skipif(
    host_limits.processor_quota() is not None, reason="busy cores would use up the CPU quota"
)


def busy_cores(of: int) -> dict[int, set[int]]:
    """The processes that keep cores busy for a process, with their cores."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            given = (folder / "cmdline").read_bytes().split(b"\0")[:-1]
            if given[-3:-2] == [idle_states.__file__.encode()] and int(given[-1]) == of:
                process = int(folder.name)
                found[process] = os.sched_getaffinity(process)
    return found


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


@needs_no_quota
def test_without_a_driver_of_idle_states_cores_are_kept_busy(monkeypatch, tmp_path):
    monkeypatch.setattr(idle_states, "DRIVER", tmp_path / "missing")
    cores = os.sched_getaffinity(0)
    with idle_states.prevent_idle_states():
        each = [{core} for core in sorted(cores)]
        assert eventually(lambda: sorted(busy_cores(os.getpid()).values(), key=min) == each)
        for process in busy_cores(os.getpid()):
            assert eventually(lambda own=process: os.sched_getscheduler(own) == os.SCHED_IDLE)
    assert not busy_cores(os.getpid())


@needs_no_quota
def test_cores_are_not_kept_busy_after_a_kill():
    program = (
        "import sys, time, pathlib; sys.path.insert(0, sys.argv[1]); import idle_states\n"
        "idle_states.DRIVER = pathlib.Path('/missing')\n"
        "with idle_states.prevent_idle_states(): print('inside', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(BENCHMARKS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "inside\n"
        assert eventually(lambda: len(busy_cores(parent.pid)) == len(os.sched_getaffinity(0)))
        parent.kill()
    assert eventually(lambda: not busy_cores(parent.pid))


@pytest.mark.parametrize(
    ("fractions", "complaint"),
    [
        ((0.5, 0.05), "rank 1: 0.05 of a core is a quota of 500 us .* minimum is 1000 us"),
        ((-1.0,), "rank 0: -1.0 of a core"),
        ((float("nan"),), "rank 0: nan of a core"),
        ((), "sum to 0 cores"),
        ((1000.0, 1000.0), "sum to 2000 cores, and this process may use"),
    ],
)
def test_impossible_fractions_are_errors(fractions, complaint):
    with pytest.raises(ValueError, match=complaint), cpu_quotas(fractions):
        pass


def test_tree_whose_controllers_cannot_be_read_gives_no_quotas(monkeypatch, tmp_path):
    files = {"cgroup": "0::/\n", "mounts": f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(emulation, "SELF", tmp_path)
    with pytest.raises(EmulationUnavailable, match="no cgroup tree with it is mounted"):
        emulation.find_hierarchy()


def test_speeds_become_quotas_that_the_cores_allow(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert quotas_of((4, 2, 1), 0.8) == pytest.approx((0.8, 0.4, 0.2))
    assert quotas_of((1, 1, 1), 0.9) == pytest.approx((0.6, 0.6, 0.6))


def test_quota_files_of_each_cgroup_version(tmp_path):
    (tmp_path / "cgroup.subtree_control").write_text("")
    first = emulation.Version1(tmp_path).make("first", 2500)
    assert (first / "cpu.cfs_period_us").read_text() == "10000"
    assert (first / "cpu.cfs_quota_us").read_text() == "2500"
    second = emulation.Version2(tmp_path).make("second", 2500)
    assert (first / "cpu.shares").read_text() == "262144"
    assert (second / "cpu.max").read_text() == "2500 10000"
    assert (second / "cpu.weight").read_text() == "10000"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"


def _congestion_control_of_a_connection(hosts: Hosts) -> str:
    """In a thread of its own, as `enter` moves the calling thread."""
    hosts.enter(1)
    with socket.create_server((hosts.address(1), 0)) as server:
        hosts.enter(0)
        with socket.create_connection(server.getsockname()) as connection:
            name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()


def test_connections_between_hosts_do_not_use_the_congestion_control_of_the_machine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # `enter` changes it
    try:
        with emulated_network(bits_per_second=1e9) as hosts, ThreadPoolExecutor(1) as thread:
            used = thread.submit(_congestion_control_of_a_connection, hosts).result(60)
    except EmulationUnavailable as why:
        pytest.skip(f"no network namespaces here: {why}")
    assert used == network.CONGESTION_CONTROL

"""Device properties, also if NVML is missing, broken or restricted."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest
import torch

from poplar.hardware.gpu_specifications import SPECIFICATIONS, specification
from poplar.profiler import timing
from poplar.system import devices, host_limits, nvml

CPU = torch.device("cpu")
GIB = 1 << 30


class NVMLError(Exception):
    pass


class FakeNvml(types.ModuleType):
    """A `pynvml` with a list of cards. A missing entry of a card raises, as in NVML."""

    NVML_CLOCK_SM = 1

    def __init__(self, cards, starts=True):
        super().__init__("pynvml")
        self.cards = cards
        self.starts = starts

    def nvmlInit(self):
        if not self.starts:
            raise NVMLError("Driver/library version mismatch")

    def _find(self, key, value):
        for card in self.cards:
            if card.get(key) == value:
                return card
        raise NVMLError("Not Found")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._find("uuid", uuid)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card):
        return self._find("uuid", _known(card, "cut_from"))

    def nvmlDeviceGetUUID(self, card):
        return _known(card, "uuid")

    def nvmlSystemGetDriverVersion(self):
        return b"570.86.15"  # bytes, as in old versions of pynvml

    def nvmlDeviceGetClockInfo(self, card, kind):
        return _known(card, "clock")

    def nvmlDeviceGetMaxClockInfo(self, card, kind):
        return _known(card, "max_clock")

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return _known(card, "processes")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card):
        return _known(card, "reasons")

    def nvmlDeviceGetNvLinkState(self, card, link):
        return int(link in _known(card, "nvlinks"))

    def nvmlDeviceGetNvLinkVersion(self, card, link):
        return 4

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card):
        return _known(card, "pcie")[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, card):
        return _known(card, "pcie")[1]

    def nvmlDeviceGetMaxPcieLinkWidth(self, card):
        return _known(card, "pcie")[2]


def _known(card, what):
    if what not in card:
        raise NVMLError("Not Supported")
    return card[what]


def card(number, **more):
    return {"uuid": f"GPU-{number}", **more}


@pytest.fixture
def cards(monkeypatch):
    """Install a fake NVML; returns its list of cards, to be filled."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = []
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(found))
    return found


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device with 24 GiB; 18 are free and torch holds 2."""
    properties = SimpleNamespace(
        name="NVIDIA GeForce RTX 4090",
        uuid="7",
        major=8,
        minor=9,
        multi_processor_count=128,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: properties.name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (18 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    return properties


def process(pid, gib):
    return SimpleNamespace(pid=pid, usedGpuMemory=None if gib is None else gib * GIB)


def test_cuda_device_is_described_with_nvml(cuda, cards, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 42)
    cards.append(
        card(
            7,
            clock=1200,
            max_clock=2520,
            reasons=0x04 | 0x40,
            nvlinks={0, 1, 2},
            pcie=(4, 8, 16),
            processes=[process(1, 2), process(42, 4)],
        )
    )
    info = devices.describe(torch.device("cuda", 0))
    assert info.name == "NVIDIA GeForce RTX 4090"
    assert (info.uuid, info.driver, info.capability) == ("GPU-7", "570.86.15", (8, 9))
    assert info.links == ("NVLink 4 x3", "PCIe 4 x8 (of x16)")
    assert info.others_bytes == 2 * GIB, "24 less 18 free less 4 of this process"
    assert info.throttled == "too hot (hardware thermal slowdown)"
    assert info.notes == ("power cap",)
    assert info.has_bf16


def test_throttle_reason_is_heat_but_not_a_power_cap(cuda, cards):
    cards.append(card(7, reasons=0x01 | 0x02 | 0x04))
    assert devices.throttle_reason(torch.device("cuda", 0)) == ""
    cards[0]["reasons"] = 0x20 | 0x80
    reason = devices.throttle_reason(torch.device("cuda", 0))
    assert "too hot" in reason
    assert "power brake" in reason


def test_peer_access_is_listed_by_the_uuid_of_each_other_card(monkeypatch):
    uuids = ("aa", "bb", "GPU-cc")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=uuids[device.index]),
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other == 2)
    assert devices.peer_access(torch.device("cuda", 1)) == {"GPU-aa": False, "GPU-cc": True}
    assert devices.peer_access(torch.device("cpu")) == {}


def test_memory_available_excludes_other_processes(cuda, cards, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 42)
    device = torch.device("cuda", 0)
    cards.append(card(7, processes=[process(42, 4), process(43, 2)]))
    assert devices.memory_available(device, 1) == 22 * GIB
    cards[0]["processes"] = [process(90001, 5)]  # the host's number for this process
    assert devices.memory_available(device, 1) == 23 * GIB
    cards[0]["processes"] = [process(42, None)]  # a driver that does not report the memory
    assert devices.memory_available(device, 1) == 20 * GIB, "only what torch holds"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_on_one_device_share_its_memory(cuda, cards, monkeypatch, ranks):
    """They may use 24 GiB together, with the 6 GiB that they hold already."""
    cards.append(card(7, processes=[process(pid, 6 // ranks) for pid in range(ranks)]))
    budgets = []
    for pid in range(ranks):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        budgets.append(devices.memory_available(torch.device("cuda", 0), ranks))
    assert budgets == [24 // ranks * GIB] * ranks


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "not installed"),
        (FakeNvml([], starts=False), "version mismatch"),
        (FakeNvml([]), "does not know cuda:0"),
        (types.ModuleType("pynvml"), "does not start"),
    ],
)
def test_device_is_described_without_nvml(cuda, monkeypatch, library, reason):
    monkeypatch.setitem(sys.modules, "pynvml", library)
    info = devices.describe(torch.device("cuda", 0))
    assert (info.name, info.uuid) == ("NVIDIA GeForce RTX 4090", "GPU-7")
    assert info.others_bytes == 4 * GIB
    assert info.links == ()
    assert reason in info.notes[0]
    assert devices.throttle_reason(torch.device("cuda", 0)) == ""


def test_devices_are_found_by_uuid_in_any_order(cards):
    cards += [card(1), card(2), card(3)]
    assert nvml.find(0, "3").uuid == "GPU-3"
    assert "does not know cuda:5" in nvml.find(5, "9").problem


def test_mig_slice_has_its_memory_and_links_of_its_device(cards, monkeypatch):
    cards += [
        card(7, clock=1410, max_clock=1410, reasons=0x08, pcie=(4, 16, 16)),
        {"uuid": "MIG-aa", "cut_from": "GPU-7", "processes": [process(1, 3)]},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aa")
    found = nvml.find(0, "7")
    assert found.uuid == "MIG-aa"
    assert found.own_bytes() == 3 * GIB
    assert found.links() == ("PCIe 4 x16",)
    assert found.slowdowns() == ("hardware slowdown (temperature or power)",)


def test_cpu_is_described():
    info = devices.describe(CPU)
    assert (info.kind, info.capability, info.throttled) == ("cpu", None, "")
    assert info.name
    assert info.cores >= 1
    assert info.total_bytes > 0
    assert 0 <= info.others_bytes <= info.total_bytes
    assert devices.throttle_reason(CPU) == ""


def test_ranks_of_a_host_share_free_memory():
    alone, one_of_four = devices.memory_available(CPU, 1), devices.memory_available(CPU, 4)
    own = host_limits.resident_memory()
    assert own > 0
    assert (one_of_four - own) * 4 == pytest.approx(alone - own, rel=0.1)


def test_other_device_types_raise():
    with pytest.raises(ValueError, match="not on meta"):
        devices.describe(torch.device("meta"))


def test_unknown_memory_asks_for_memory_limit(tmp_path, monkeypatch):
    pretend(monkeypatch, tmp_path, {})
    with pytest.raises(RuntimeError, match="pass memory_limit="):
        devices.memory_available(CPU, 1)
    assert "does not report its memory" in devices.describe(CPU).notes[0]


MEMINFO = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n"


def pretend(monkeypatch, folder, files):
    """Make `host_limits` read these files instead of those of the kernel."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(host_limits, "_PROC", folder / "proc")
    monkeypatch.setattr(host_limits, "_CGROUPS", folder / "cgroup")


@pytest.mark.parametrize(
    ("files", "total_kib", "free_kib"),
    [
        ({}, 1000, 800),
        (
            {  # version 2; the limit is the parent's, page cache does not count as used
                "proc/self/cgroup": "0::/outer/inner\n",
                "cgroup/outer/inner/memory.max": "max\n",
                "cgroup/outer/inner/memory.current": "1024\n",
                "cgroup/outer/memory.max": str(500 * 1024),
                "cgroup/outer/memory.current": str(300 * 1024),
                "cgroup/outer/memory.stat": f"anon 5\ninactive_file {100 * 1024}\n",
            },
            500,
            300,
        ),
        (
            {  # version 1 in a container: the path is the host's, only the root is mounted
                "proc/self/cgroup": "5:cpu:/docker/x\n4:memory:/docker/x\n0::/\n",
                "cgroup/memory/memory.limit_in_bytes": str(600 * 1024),
                "cgroup/memory/memory.usage_in_bytes": str(100 * 1024),
                "cgroup/memory/memory.stat": "inactive_file 0\ntotal_inactive_file 0\n",
            },
            600,
            500,
        ),
        (
            {  # version 1 without a limit
                "proc/self/cgroup": "4:memory:/\n",
                "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cgroup/memory/memory.usage_in_bytes": "5\n",
            },
            1000,
            800,
        ),
    ],
)
def test_container_limits_memory(tmp_path, monkeypatch, files, total_kib, free_kib):
    pretend(monkeypatch, tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert host_limits.total_memory() == total_kib * 1024
    assert host_limits.free_memory() == free_kib * 1024


UNLIMITED = "Max data size             unlimited            unlimited            bytes\n"


@pytest.mark.parametrize(
    ("limits", "limit_kib", "unused_kib"),
    [
        (UNLIMITED, None, None),
        (UNLIMITED.replace("unlimited", str(700 * 1024), 1), 700, 400),
        ("Max address space         921600               921600               bytes\n", 900, 0),
        (
            "Max data size             409600               unlimited            bytes\n"
            "Max address space         2048000              unlimited            bytes\n",
            400,
            100,
        ),
    ],
)
def test_limits_of_the_process_limit_memory(tmp_path, monkeypatch, limits, limit_kib, unused_kib):
    status = "VmSize:\t 1000 kB\nVmData:\t 300 kB\nRssAnon:\t 50 kB\nVmHWM:\t 70 kB\n"
    files = {"proc/meminfo": MEMINFO, "proc/self/limits": limits, "proc/self/status": status}
    pretend(monkeypatch, tmp_path, files)
    assert host_limits.process_limit() == (None if limit_kib is None else limit_kib * 1024)
    unused = host_limits.unused_process_memory()
    assert unused == (None if unused_kib is None else unused_kib * 1024)
    free = 400 if unused_kib is None else min(400, unused_kib)
    assert devices.memory_available(CPU, 2) == (free + 50) * 1024
    assert devices.peak_memory(CPU) == 70 * 1024


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a\n", "cgroup/a/cpu.max": "50000 100000\n"}, 0.5),
        ({"proc/self/cgroup": "0::/a\n", "cgroup/a/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
                "cgroup/cpu/a/cpu.cfs_quota_us": "2500\n",
                "cgroup/cpu/a/cpu.cfs_period_us": "10000\n",
                "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            },
            0.25,
        ),
    ],
)
def test_cpu_quota_is_read(tmp_path, monkeypatch, files, quota):
    pretend(monkeypatch, tmp_path, files)
    assert host_limits.processor_quota() == quota
    shared = host_limits.shared_quota()
    assert (None if shared is None else shared[1]) == quota
    if shared is not None:
        groups = (path.parent for path in tmp_path.rglob("cpu*") if path.is_file())
        assert shared[0] in {group.stat().st_ino for group in groups}
    notes = " ".join(devices.describe(CPU).notes)
    assert ("CPU quota" in notes) == (quota is not None)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16"),
        ("Tesla V100S-PCIE-32GB", "V100S-PCIe-32"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80"),
        ("NVIDIA H200", "H200-SXM-141"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX-5070-Ti"),
        ("NVIDIA GeForce RTX 5070", None),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", None),
        ("NVIDIA L40", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("AMD EPYC", None),
    ],
)
def test_specifications_are_found_by_driver_name(name, gpu):
    found = specification(name)
    assert (found and found.gpu) == gpu


def test_every_specification_has_a_source():
    assert all(known.source and known.half_flops > 1e12 for known in SPECIFICATIONS)


def test_peak_flops_come_from_specification_or_measurement(cuda, monkeypatch):
    monkeypatch.setattr(timing, "measure_flops", lambda device, dtype: 1.0)
    device = torch.device("cuda", 0)
    assert timing.peak_flops(device, torch.bfloat16) == 165.2e12
    assert timing.peak_flops(device, torch.float32) == 1.0, "specified for half precision"
    cuda.name = "Tesla V100-SXM2-16GB"
    assert timing.peak_flops(device, torch.float16) == 125e12
    assert timing.peak_flops(device, torch.bfloat16) == 1.0, "emulated on this device"
    assert timing.peak_flops(CPU, torch.float32) == 1.0


def test_measuring_flops_preserves_random_state(monkeypatch):
    monkeypatch.setitem(timing._MATRIX_SIDE, "cpu", 128)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert timing.measure_flops(CPU, torch.float32) > 1e6
    assert torch.equal(torch.get_rng_state(), before)


def test_unsupported_dtype_has_no_peak_flops():
    assert timing.peak_flops(CPU, torch.bool) is None

"""The findings of the doctor, and that all ranks get the same report."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta

import pytest
import ranks as pool
import torch

import poplar
from poplar.doctor import RankFacts, Report, examine
from poplar.doctor.checks import findings
from poplar.doctor.facts import collect_facts
from poplar.system.devices import DeviceInfo
from poplar.values.schema import from_fields, to_json_types

GIB = 1 << 30


def gpu(name="NVIDIA A100-SXM4-80GB", capability=(8, 0), **more):
    return DeviceInfo(
        name=name,
        kind="cuda",
        host=more.pop("host", "one"),
        cores=108,
        total_bytes=80 * GIB,
        others_bytes=more.pop("others_bytes", GIB // 2),
        capability=capability,
        **more,
    )


def facts(rank, device=None, versions=(), **more):
    device = device if device is not None else gpu(uuid=f"GPU-{rank}")
    values = {
        "rank": rank,
        "host_id": "0",
        "device": device,
        "dtypes": ("float32", "float16", "bfloat16"),
        "versions": {
            "poplar": "0.1.0",
            "python": "3.12.1",
            "torch": "2.13.0+cu130",
            "CUDA": "13.0",
            "NCCL": "2.29.2",
            "driver": "580.1",
            **dict(versions),
        },
        "machine": "x86_64",
        "operators": "C++",
        "native_operators": True,
        "transport": "process group",
        "memory_bytes": 79 * GIB,
        "shared_memory_bytes": (8 * GIB, 8 * GIB),
        "cores": 16,
        "threads": 16,
        "address": "10.0.0.1",
        "architectures": ("sm_80", "sm_90"),
        **more,
    }
    return RankFacts(**values)


def all_findings(*ranks):
    return list(findings(ranks))


def only_finding(*ranks):
    (finding,) = all_findings(*ranks)
    return finding


def test_equal_ranks_have_no_findings():
    assert all_findings(facts(0), facts(1), facts(2)) == []


@pytest.mark.parametrize(
    ("versions", "kind", "text"),
    [
        ({"NCCL": "2.21.5"}, "problem", "NCCL differs: 2.29.2 (ranks 0, 2), 2.21.5 (rank 1)"),
        ({"poplar": "0.2.0"}, "problem", "poplar differs"),
        ({"torch": "2.12.0+cu130"}, "problem", "torch differs: 2.13.0 (ranks 0, 2), 2.12.0"),
        ({"driver": "550.2"}, "advice", "driver differs"),
        ({"python": "3.11.2"}, "advice", "python differs"),
    ],
)
def test_different_versions_are_listed_with_their_ranks(versions, kind, text):
    finding = only_finding(facts(0), facts(1, versions=versions), facts(2))
    assert finding.kind == kind
    assert text in finding.what
    assert finding.fix


def test_another_build_of_the_same_torch_is_advice():
    finding = only_finding(facts(0), facts(1, versions={"torch": "2.13.0+cu126", "CUDA": "12.6"}))
    assert finding.kind == "advice"
    assert finding.what == "CUDA differs: 13.0 (rank 0), 12.6 (rank 1)"


def test_a_device_without_bf16_is_advice_that_explains_auto():
    old = facts(
        1,
        gpu("Tesla V100-SXM2-16GB", (7, 0), uuid="GPU-1"),
        dtypes=("float32", "float16"),
        architectures=("sm_70",),
    )
    finding = only_finding(facts(0), old)
    assert (finding.kind, finding.ranks) == ("advice", (1,))
    assert "Tesla V100-SXM2-16GB" in finding.what
    assert "float16 with one loss scale on all ranks, also on rank 0" in finding.fix
    assert "also on" not in only_finding(old).fix


@pytest.mark.parametrize(
    ("architectures", "runs"),
    [
        (("sm_80", "sm_90"), True),
        (("sm_75",), False),
        (("sm_90",), False),
        (("sm_75", "compute_75"), True),
        (("sm_86",), True),
        (("sm_100a", "compute_100a"), False),
        (("compute_90",), False),
        (("compute_80a",), False),
        (("sm_86a",), True),
        (("compute_80f",), True),
    ],
)
def test_torch_needs_kernels_for_the_device(architectures, runs):
    card = gpu("NVIDIA RTX A6000", (8, 6), uuid="GPU-0")
    found = all_findings(facts(0, card, architectures=architectures))
    assert (found == []) == runs
    if not runs:
        assert "no kernels for NVIDIA RTX A6000 (sm_86" in found[0].what


def test_operators_need_kernels_for_the_device():
    card = gpu("NVIDIA RTX A6000", (8, 6), uuid="GPU-0")
    what, fix = "not compiled for sm_86 in /srv/a; b", "build again; or turn them off"
    (found,) = all_findings(facts(0, card, operators_problem=(what, fix)))
    assert (found.kind, found.what, found.fix) == ("problem", what, fix)


V100 = gpu("Tesla V100-SXM2-16GB", (7, 0), uuid="GPU-0")
PASCAL = gpu("NVIDIA GeForce GTX 1060", (6, 1), uuid="GPU-1")
BLACKWELL = gpu("NVIDIA GeForce RTX 5090", (12, 0), uuid="GPU-2")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("devices", "architectures", "ranks", "fix"),
    [
        ((V100,), CU130, (0,), "the cu126 build of the same torch version"),
        ((BLACKWELL,), CU126, (0,), "a build of torch for CUDA 12.8 or later"),
        ((V100, BLACKWELL), CU130, (0,), "the cu128 build of torch 2.10"),
        ((V100, BLACKWELL), CU126, (1,), "the cu128 build of torch 2.10"),
        ((BLACKWELL, PASCAL), CU130, (1,), "no published build has kernels for both"),
    ],
)
def test_the_build_of_torch_for_all_cards_is_named(devices, architectures, ranks, fix):
    found = all_findings(
        *(facts(rank, gpu, architectures=architectures) for rank, gpu in enumerate(devices))
    )
    assert (found[0].kind, found[0].ranks) == ("problem", ranks)
    assert fix in found[0].fix


def test_ranks_with_the_same_finding_share_it():
    ranks = [
        facts(rank, dataclasses.replace(V100, uuid=f"GPU-{rank}"), architectures=CU130)
        for rank in range(2)
    ]
    assert only_finding(*ranks).ranks == (0, 1)


PAIR = {
    0: gpu("NVIDIA GeForce RTX 4090", (8, 9), uuid="GPU-0"),
    1: gpu("NVIDIA GeForce RTX 3090", (8, 6), uuid="GPU-1"),
}


def pair(access, **settings):
    return [
        facts(rank, PAIR[rank], peer_access={f"GPU-{1 - rank}": access}, settings=settings)
        for rank in PAIR
    ]


def test_gpus_without_peer_to_peer_access_use_shared_host_memory():
    finding = only_finding(*pair(access=False), facts(2))
    assert finding.kind == "advice"
    names = "NVIDIA GeForce RTX 3090, NVIDIA GeForce RTX 4090"
    assert finding.what == f"no peer-to-peer access between ranks 0 and 1 ({names})"
    assert "host memory (SHM)" in finding.fix
    assert "/dev/shm" in finding.fix
    assert all_findings(*pair(access=True)) == []
    unknown = [facts(rank, PAIR[rank]) for rank in PAIR]
    assert all_findings(*unknown) == [], "each process sees its own GPU only"


def test_a_single_process_says_how_to_examine_all_gpus():
    finding = only_finding(pair(access=False)[0])
    assert finding.what == "2 GPUs are visible, and one of them was examined"
    assert "torchrun --nproc-per-node 2 -m poplar doctor" in finding.fix


def test_settings_that_turn_off_transports_are_named():
    finding = only_finding(*pair(access=False, NCCL_SHM_DISABLE="1"))
    assert finding.fix == "NCCL uses sockets, because of NCCL_SHM_DISABLE=1; unset it"
    finding = only_finding(*pair(access=True, NCCL_P2P_LEVEL="LOC"))
    assert finding.what == "peer-to-peer access is turned off by NCCL_P2P_LEVEL=LOC"
    assert all_findings(*pair(access=True, NCCL_P2P_LEVEL="SYS", NCCL_SHM_DISABLE="1")) == []


def test_wsl2_is_advice():
    finding = only_finding(facts(0, kernel="5.15.167.4-microsoft-standard-WSL2"))
    assert finding.kind == "advice"
    assert "pin_memory=False" in finding.fix
    assert all_findings(facts(0, kernel="6.1.0-18-amd64")) == []


def test_cpu_and_cuda_ranks_do_not_mix():
    processor = DeviceInfo(
        name="EPYC", kind="cpu", host="one", cores=16, total_bytes=64 * GIB, others_bytes=0
    )
    finding = only_finding(facts(0), facts(1, processor))
    assert finding.kind == "problem"
    assert "cuda (rank 0), cpu (rank 1)" in finding.what


def test_two_ranks_on_one_device_are_a_problem_unless_allowed():
    finding = only_finding(facts(0, gpu(uuid="GPU-7")), facts(1, gpu(uuid="GPU-7")))
    assert (finding.kind, finding.ranks) == ("problem", (0, 1))
    shared = {"device": gpu(uuid="GPU-7"), "settings": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}
    finding = only_finding(facts(0, **shared), facts(1, **shared))
    assert finding.kind == "advice"
    assert "memory_limit=" in finding.fix


def test_a_host_name_that_resolves_to_loopback_is_a_problem():
    there = facts(1, gpu(uuid="GPU-1", host="two"), host_id="1", address="127.0.1.1")
    finding = only_finding(facts(0), there)
    assert (finding.kind, finding.ranks) == ("problem", (1,))
    assert "GLOO_SOCKET_IFNAME" in finding.fix
    with_interface = dataclasses.replace(there, settings={"GLOO_SOCKET_IFNAME": "eth0"})
    assert all_findings(facts(0), with_interface) == []
    for_nccl_only = dataclasses.replace(there, settings={"NCCL_SOCKET_IFNAME": "eth0"})
    assert only_finding(facts(0), for_nccl_only).kind == "problem", "gloo connects hosts too"
    alone = facts(0, address="")
    assert all_findings(alone) == [], "a single host needs no address"


def test_the_loopback_interface_cannot_connect_hosts():
    settings = {"NCCL_SOCKET_IFNAME": "lo"}
    there = facts(1, gpu(uuid="GPU-1", host="two"), host_id="1", settings=settings)
    finding = only_finding(facts(0), there)
    assert (finding.kind, finding.ranks) == ("problem", (1,))
    assert "NCCL_SOCKET_IFNAME=lo" in finding.what
    assert all_findings(facts(0, settings=settings)) == [], "one host"


def test_two_hosts_with_one_name_are_a_problem():
    finding = only_finding(facts(0), facts(1, host_id="1"))
    assert finding.kind == "problem"
    assert "2 hosts have the same name 'one'" in finding.what


def test_two_launchers_on_one_host_are_no_problem(monkeypatch):
    """As torchrun --nnodes 2, started twice on one machine."""
    ranks = []
    for number in range(2):
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("GROUP_RANK", str(number))
        ranks.append(collect_facts(torch.device("cpu")))
    assert [found for found in findings(ranks) if found.kind == "problem"] == []


def test_small_shared_memory_of_a_container_is_advice():
    small = {"shared_memory_bytes": (64 << 20, 64 << 20)}
    assert only_finding(facts(0, **small)).kind == "advice", "the default of Docker"
    finding = only_finding(facts(0, **small), facts(1, **small))
    assert "64.0 MiB free in /dev/shm" in finding.what
    assert "--shm-size=8g or --ipc=host" in finding.fix
    assert "no /dev/shm" in only_finding(facts(0, shared_memory_bytes=None)).what


def test_more_ranks_than_cores_are_advice():
    finding = only_finding(*(facts(rank, cores=2) for rank in range(4)))
    assert finding.what == "4 ranks on 2 cores"


def test_more_threads_than_cores_name_the_number_that_fits():
    processor = DeviceInfo(
        name="EPYC", kind="cpu", host="one", cores=16, total_bytes=64 * GIB, others_bytes=0
    )
    finding = only_finding(*(facts(rank, processor, threads=16) for rank in range(4)))
    assert finding.what == "64 threads of torch on 16 cores"
    assert "OMP_NUM_THREADS=4" in finding.fix
    assert all_findings(facts(0, processor)) == []
    assert all_findings(*(facts(rank, processor, threads=4) for rank in range(4))) == []


PROCESSOR = DeviceInfo(
    name="EPYC", kind="cpu", host="one", cores=16, total_bytes=64 * GIB, others_bytes=0
)


def pinned(rank, mask, **more):
    """A rank on the CPU that may run on the cores of this mask."""
    cores = mask.bit_count()
    more = {"cores": cores, "threads": cores, **more}
    return facts(rank, PROCESSOR, affinity=f"{mask:x}", **more)


def test_ranks_on_cores_of_their_own_share_none():
    assert all_findings(*(pinned(rank, 1 << rank) for rank in range(8))) == []
    assert all_findings(*(pinned(rank, 0xF << 4 * rank) for rank in range(4))) == []
    finding = only_finding(*(pinned(rank, 0x3) for rank in range(4)))
    assert finding.what == "4 ranks on 2 cores"
    finding = only_finding(*(pinned(rank, 0xF << 4 * rank, threads=16) for rank in range(4)))
    assert finding.what == "64 threads of torch on 16 cores"
    assert "OMP_NUM_THREADS=4" in finding.fix


def test_a_cpu_quota_limits_the_cores():
    finding = only_finding(*(pinned(rank, 0xFFFF, cpu_quota=(7, 3.5)) for rank in range(4)))
    assert finding.what == "4 ranks on 3.5 cores"
    finding = only_finding(pinned(0, 0xFFFF, cpu_quota=(7, 2.0)))
    assert finding.what == "16 threads of torch on 2 cores"
    assert "OMP_NUM_THREADS=2" in finding.fix
    assert all_findings(pinned(0, 0xFFFF, threads=1, cpu_quota=(7, 0.5))) == []


def test_ranks_with_quotas_of_their_own_share_none():
    four = {"threads": 4}
    own = [pinned(rank, 0xFFFF, cpu_quota=(rank, 4.0), **four) for rank in range(4)]
    assert all_findings(*own) == []
    assert all_findings(pinned(0, 0xFFFF, **four), *own[1:]) == [], "rank 0 has none"
    shared = [pinned(rank, 0xFFFF, cpu_quota=(7, 4.0), **four) for rank in range(4)]
    assert only_finding(*shared).what == "16 threads of torch on 4 cores"


def test_the_cores_of_this_process_are_known():
    (mine,) = examine().ranks
    assert int(mine.affinity, 16).bit_count() == mine.cores
    assert from_fields(RankFacts, to_json_types(mine)) == mine


def test_throttling_other_processes_and_narrow_links_are_reported():
    hot = gpu(
        uuid="GPU-0", throttled="too hot", others_bytes=20 * GIB, links=("PCIe 4 x4 (of x16)",)
    )
    shown = " ".join(map(str, all_findings(facts(0, hot), facts(1))))
    assert "too hot" in shown
    assert "other processes hold 20.00 GiB of the 80.00 GiB" in shown
    assert "PCIe 4 x4 (of x16)" in shown


def test_slow_operators_are_advice_and_missing_transports_a_problem():
    slow = facts(0, operators="plain PyTorch (not built)", native_operators=False)
    assert only_finding(slow).kind == "advice"
    lone = facts(0, transport="none: this build of torch has no torch.distributed")
    assert only_finding(lone).kind == "problem"


def test_problems_come_first_and_make_the_report_not_ok():
    hot, old = gpu(uuid="GPU-1", throttled="too hot"), {"NCCL": "2.21.5"}
    ranks = (facts(0), facts(1, hot, versions=old))
    report = Report(ranks=ranks, findings=tuple(findings(ranks)))
    assert [finding.kind for finding in report.findings] == ["problem", "advice"]
    assert not report.ok
    assert "problem: ranks 0-1: NCCL differs" in str(report)


def test_notes_on_devices_are_shown_with_their_ranks():
    limited = gpu(uuid="GPU-1", notes=("the power cap is reached", "fixed clocks"))
    shown = str(Report(ranks=(facts(0), facts(1, limited)), findings=()))
    assert "\nnotes: none (rank 0), the power cap is reached; fixed clocks (rank 1)\n" in shown
    assert "notes" not in str(Report(ranks=(facts(0), facts(1)), findings=()))


def test_facts_survive_json():
    mine = facts(3)
    assert from_fields(RankFacts, json.loads(json.dumps(to_json_types(mine)))) == mine


def test_this_machine_has_no_problems():
    report = examine()
    assert report.ok, str(report)
    (mine,) = report.ranks
    assert mine.versions["poplar"] == poplar.__version__
    assert mine.memory_bytes > 0
    assert "operators" in str(report)
    json.dumps(report.to_dict())


def examine_twice():
    first, second = examine(), examine()
    assert len(first.ranks) == len(second.ranks) == pool.WORLD
    assert [rank.rank for rank in first.ranks] == list(range(pool.WORLD))
    return str(first)


def test_all_ranks_get_the_same_report(ranks):
    reports = ranks.run(examine_twice)
    assert len(set(reports)) == 1


def examine_unless(absent):
    if pool.rank() != absent:
        examine(timeout=timedelta(seconds=2))


def test_a_rank_that_does_not_report_is_named():
    failures = pool.one_off(2, examine_unless, 1)
    assert failures[0].is_a(poplar.CollectiveTimeout)
    assert "rank 0: rank 1 did not report within 2 s" in failures[0].message

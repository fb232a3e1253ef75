"""Which transport is used where; without GPUs and without other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poplar.comm import transport_selection
from poplar.comm.host_memory.rendezvous import NotOneHost
from poplar.comm.host_topology import Hosts
from poplar.comm.transport_selection import connect

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def a_group(monkeypatch: pytest.MonkeyPatch, backend: str, names: str) -> Any:
    """The group of ranks on the hosts named by letters, over a backend."""
    monkeypatch.setattr(transport_selection, "Control", lambda group: None)
    monkeypatch.setattr(transport_selection, "_find_hosts", lambda control: Hosts.of(names))
    monkeypatch.setattr(transport_selection.dist, "get_backend_config", lambda group: backend)
    kinds = ("ProcessGroupCommunicator", "StagedCommunicator", "HierarchicalCommunicator")
    for name in kinds:
        monkeypatch.setattr(transport_selection, name, lambda *_, name=name: name)
    backends = dict(part.split(":") for part in backend.split(","))
    return SimpleNamespace(
        process_group=None,
        size=len(names),
        is_on_host=lambda device: backends.get(device.type) == "gloo",
        supports=lambda device: device.type == "cpu" or backends.get(device.type) == "nccl",
        split=lambda members: None,
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a", "ProcessGroupCommunicator"),
        ("aaaa", "ProcessGroupCommunicator"),
        ("abcd", "ProcessGroupCommunicator"),
        ("abbb", "HierarchicalCommunicator"),
        ("aabb", "HierarchicalCommunicator"),
        ("aabccc", "HierarchicalCommunicator"),
    ],
)
def test_gpus_use_hierarchical_where_it_relieves_a_network(
    monkeypatch: pytest.MonkeyPatch, names: str, expected: str
) -> None:
    group = a_group(monkeypatch, "cpu:gloo,cuda:nccl", names)
    assert connect(group, "auto", CUDA) == expected


@pytest.mark.parametrize("choice", ["auto", "staged"])
def test_gpus_beside_gloo_are_staged(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    group = a_group(monkeypatch, "cpu:gloo,cuda:gloo", "aabb")
    monkeypatch.setattr(transport_selection, "_connect_to_hosts", lambda *_: "on the host")
    assert connect(group, choice, CUDA) == "StagedCommunicator"


@pytest.mark.parametrize("choice", ["process_group", "hierarchical:process_group"])
def test_a_backend_without_support_for_the_device_raises_with_the_alternatives(
    monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    """gloo would abort the process when it reads from a CUDA address."""
    group = a_group(monkeypatch, "cpu:gloo,cuda:gloo", "aabb")
    with pytest.raises(ValueError, match=r"on cuda:0 over the backend 'cpu:gloo,cuda:gloo'") as why:
        connect(group, choice, CUDA)
    assert all(way in str(why.value) for way in ("'auto'", "'staged'", "'nccl'", choice))


@pytest.mark.parametrize("choice", ["process_group", "hierarchical:process_group"])
def test_a_plan_for_another_backend_raises(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    group = a_group(monkeypatch, "cpu:gloo,cuda:gloo", "aabb")
    with pytest.raises(ValueError, match=r"transport .* is not available here"):
        connect(group, "auto", CUDA, planned=choice)


def test_shared_memory_for_gpus_raises_with_the_alternatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = a_group(monkeypatch, "cuda:nccl", "aabb")
    with pytest.raises(ValueError, match="is for tensors on the CPU") as why:
        connect(group, "hierarchical", CUDA)
    assert "'hierarchical:process_group'" in str(why.value)


def test_cpu_ranks_send_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    group = a_group(monkeypatch, "cpu:gloo", "aabb")
    assert connect(group, "hierarchical:process_group", CPU) == "HierarchicalCommunicator"


@pytest.mark.parametrize(
    ("names", "expected"),
    [("aa", "shared_memory"), ("abb", "hierarchical"), ("ab", "process_group")],
)
def test_cpu_ranks_of_a_host_share_memory(
    monkeypatch: pytest.MonkeyPatch, names: str, expected: str
) -> None:
    group = a_group(monkeypatch, "cpu:gloo", names)
    monkeypatch.setattr(transport_selection, "_connect_to_hosts", lambda _, choice, *rest: choice)
    assert connect(group, "auto", CPU) == expected


def test_cpu_ranks_that_cannot_share_memory_use_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise NotOneHost("no")

    group = a_group(monkeypatch, "cpu:gloo", "aa")
    monkeypatch.setattr(transport_selection, "_connect_to_hosts", refuse)
    assert connect(group, "auto", CPU) == "ProcessGroupCommunicator"

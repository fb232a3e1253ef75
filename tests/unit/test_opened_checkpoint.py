"""What is read of a checkpoint."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan

from poplar.checkpoint.files.data_file import DataFile
from poplar.checkpoint.files.metadata_file import METADATA
from poplar.checkpoint.files.opened import OpenedCheckpoint
from poplar.checkpoint.saved_names import read_groups
from poplar.checkpoint.saved_values import digest, refused_classes, with_python_numbers
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.values.errors import DamagedCheckpoint


@pytest.mark.filterwarnings("ignore")
def test_tensor_of_which_a_part_is_missing_is_not_read(tmp_path):
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=tmp_path, no_dist=True)
    opened = OpenedCheckpoint(tmp_path)
    target = torch.zeros(4)
    opened.read_into({"model.w": target})
    assert torch.equal(target, torch.ones(4))
    opened.described["model.w"].chunks.clear()
    with pytest.raises(DamagedCheckpoint, match="0 of the 4 elements"):
        opened.read_into({"model.w": target})


@pytest.mark.filterwarnings("ignore")
def test_lack_of_memory_is_no_damage(tmp_path, monkeypatch):
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=tmp_path, no_dist=True)
    message = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B"

    def fails(*_):
        raise RuntimeError(message)

    monkeypatch.setattr(OpenedCheckpoint, "_read_item", fails)
    with pytest.raises(RuntimeError) as caught:
        OpenedCheckpoint(tmp_path).read_into({"model.w": torch.zeros(4)})
    assert str(caught.value) == message


def test_tensors_of_a_data_file_are_read_into_any_memory_without_an_unpickler(
    tmp_path, monkeypatch
):
    whole = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    entries = {"whole": whole, "step": torch.tensor(3.0), "none": torch.empty(0, 4), "shard": whole}
    items = create_default_local_save_plan(entries, True).items
    file = DataFile(tmp_path / "__0_0.distcp")
    values = {item.index: entries[item.index.fqn] for item in items}
    places = file.write_items(items, values, lambda: False)
    file.close()
    metadata = create_default_global_save_plan([SavePlan(items)])[1]
    metadata.storage_data = {
        item.index: _StorageInfo(file.path.name, *place)
        for item, place in zip(items, places, strict=True)
    }
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    opened = OpenedCheckpoint(tmp_path)
    monkeypatch.setattr(torch, "load", None)
    for target in (
        torch.empty(6, 10),
        torch.empty(10, 6).t(),
        torch.empty(6, 20)[:, ::2],
        torch.empty(6, 10, dtype=torch.float64),
        torch.empty(6, 10, dtype=torch.complex64).conj(),
    ):
        opened.read_into({"whole": target})
        assert torch.equal(target, whole.to(target.dtype))
    assert torch.equal(opened.value("step"), torch.tensor(3.0))
    assert opened.value("none").shape == (0, 4)
    for start, stop in ((0, 60), (7, 43), (10, 30), (5, 5)):
        shard = ShardTensor(torch.empty(stop - start), whole.shape, start)
        opened.read_into({"shard": shard})
        assert torch.equal(shard.local, whole.view(-1)[start:stop])


@pytest.mark.filterwarnings("ignore")
def test_tensor_of_another_dtype_than_described_is_not_read(tmp_path):
    dcp.save({"model": {"w": torch.full((4,), 1.7)}}, checkpoint_id=tmp_path, no_dist=True)
    opened = OpenedCheckpoint(tmp_path)
    opened.described["model.w"].properties.dtype = torch.int32
    with pytest.raises(DamagedCheckpoint, match=r"float32 .* describes torch\.int32"):
        opened.value("model.w")


@pytest.mark.filterwarnings("ignore")
def test_mapping_that_torch_has_stored_in_parts_is_read(tmp_path):
    stored = {"a": 1, "b": [torch.ones(1), torch.zeros(1)], "c": {"d": (1, 2)}}
    group = {"params": ["w"], "ramp": {"a": 0.5}}
    content = {"model": {"x._extra_state": stored}, "optim": {"param_groups": [group]}}
    dcp.save(content, checkpoint_id=tmp_path, no_dist=True)
    opened = OpenedCheckpoint(tmp_path)
    assert repr(opened.whole_value(("model", "x._extra_state"))) == repr(stored)
    assert read_groups(opened) == [group]
    with pytest.raises(KeyError):
        opened.whole_value(("model", "y"))


@dataclass
class Position:
    epoch: int
    losses: np.ndarray


def test_digests_are_equal_for_equal_values_only():
    values = [
        *(None, True, 1, 1.5, "1", b"1", (), {}, [1, 2], {"a": 1}, {"a": {"b": [1, "c"]}}),
        *(torch.arange(3), torch.arange(3.0), torch.zeros(3, 1), torch.zeros(1, 3)),
        *(np.arange(3), np.arange(3.0), np.arange(1, 4), np.int64(1), np.int64(2)),
        *({1, 2}, {1, 3}, frozenset({"a"}), Fraction(1, 2), Fraction(1, 3), int, float),
        *(Position(0, np.zeros(2)), Position(1, np.zeros(2)), Position(0, np.ones(2))),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": torch.ones(2), "b": 1}) == digest({"b": 1, "a": torch.ones(2)})
    assert digest([1, 2]) == digest((1, 2)), "containers of one content are alike"
    assert digest(Position(0, np.zeros(2))) == digest(Position(0, np.zeros(2)))
    assert digest({"b", "a"}) == digest({"a", "b"})
    assert digest(object()) == digest(object())
    with pytest.raises(TypeError, match="pickle"):
        digest(threading.Lock())


class Node:
    """Refers to its neighbours, and so to itself."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.before = self.after = self

    @classmethod
    def ring(cls, *values: int) -> Node:
        nodes = list(map(cls, values))
        for node, after in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            node.after, after.before = after, node
        return nodes[0]


def test_values_may_contain_themselves_and_share_parts():
    assert digest(Node.ring(1, 2, 3)) == digest(Node.ring(1, 2, 3))
    assert digest(Node.ring(1, 2, 3)) != digest(Node.ring(1, 2, 4))
    shared: list[object] = [torch.ones(2)]
    for _ in range(100):
        shared = [shared, shared]
    assert digest(shared) == digest(shared[:])


def test_numbers_of_numpy_become_those_of_python():
    given = {"lr": np.float64(0.5), np.int64(3): [np.bool_(True), (np.float32(1.5), "a")]}
    plain = with_python_numbers(given)
    assert plain == given
    assert repr(plain) == "{'lr': 0.5, 3: [True, (1.5, 'a')]}"


def test_refused_classes_are_those_that_a_load_refuses():
    assert refused_classes({"a": [1, "b", torch.ones(2)], "c": OrderedDict(d=None)}) == []
    names = refused_classes({"a": Position(0, np.zeros(2))})
    assert f"{Position.__module__}.Position" in names

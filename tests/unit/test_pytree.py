"""Any pytree of tensors is counted, split along dim 0 and rebuilt with the same types."""

from __future__ import annotations

import math
import tracemalloc
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import graphs
import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from poplar.data import pytree
from poplar.data.micro_batch_collation import MicroBatches
from poplar.data.object_content import arrays_in

Pair = namedtuple("Pair", "inputs targets")


class Typed(NamedTuple):
    inputs: torch.Tensor
    temperature: float = 1.0


@dataclass
class Batch:
    inputs: torch.Tensor
    name: str = "train"
    length: int = field(init=False, default=0)


@dataclass(frozen=True, slots=True)
class FrozenBatch:
    inputs: torch.Tensor
    weights: torch.Tensor

    def __post_init__(self):
        if len(self.inputs) != 4:
            raise ValueError("only made whole")


class NamedList(list):
    def __init__(self, name, members):
        super().__init__(members)
        self.name = name


def column() -> torch.Tensor:
    return torch.arange(4)


def matrix() -> torch.Tensor:
    return torch.arange(8).view(4, 2)


def defaulted() -> defaultdict:
    batch = defaultdict(list)
    batch["inputs"] = column()
    return batch


PYTREES = {
    "tensor": column,
    "dict": lambda: {"inputs": matrix(), "targets": column()},
    "ordered dict": lambda: OrderedDict(b=column(), a=matrix()),
    "default dict": defaulted,
    "user dict": lambda: UserDict(inputs=matrix(), targets=column()),
    "read-only mapping": lambda: MappingProxyType({"inputs": matrix()}),
    "list": lambda: [matrix(), column()],
    "list with a name": lambda: NamedList("boxes", [matrix(), column()]),
    "tuple": lambda: (matrix(), column()),
    "named tuple": lambda: Pair(matrix(), column()),
    "typed named tuple": lambda: Typed(matrix()),
    "dataclass": lambda: Batch(matrix()),
    "frozen dataclass": lambda: FrozenBatch(matrix(), column()),
    "torch return type": lambda: matrix().max(dim=1),
    "nested": lambda: {"a": [Pair(matrix(), (column(),)), {"b": Batch(matrix())}], "c": column()},
}


def shape(value):
    """The container types of a pytree, without its leaves."""
    if isinstance(value, (list, tuple)):
        return type(value), [shape(child) for child in value]
    if hasattr(value, "keys"):
        return type(value), [(key, shape(value[key])) for key in value.keys()]  # noqa: SIM118
    return type(value)


@pytest.mark.parametrize("make", PYTREES.values(), ids=PYTREES)
def test_containers_keep_their_types_and_tensors(make):
    batch = make()
    assert pytree.samples_in(batch) == 4
    before = pytree.tensors(batch)
    values = [tensor.clone() for tensor in before]

    parts = pytree.split(batch, [1, 0, 3])
    assert [shape(part) for part in parts] == [shape(batch)] * 3
    for whole, *pieces in zip(before, *map(pytree.tensors, parts), strict=True):
        assert [len(piece) for piece in pieces] == [1, 0, 3]
        assert torch.equal(torch.cat(pieces), whole)
        assert pieces[0].data_ptr() == whole.data_ptr(), "parts are views"

    doubled = pytree.map_tensors(lambda tensor: tensor * 2, batch)
    assert shape(doubled) == shape(batch)
    torch.testing.assert_close(pytree.tensors(doubled), [value * 2 for value in values])

    copied = pytree.copied(batch)
    assert shape(copied) == shape(batch)
    assert isinstance(batch, (torch.Tensor, MappingProxyType)) or copied is not batch
    assert [id(new) for new in pytree.tensors(copied)] == [id(old) for old in before]

    assert [id(now) for now in pytree.tensors(batch)] == [id(then) for then in before]
    torch.testing.assert_close(before, values)


def test_copies_of_a_list_keep_its_attributes_and_are_other_lists():
    batch = NamedList("boxes", [column()])
    copied = pytree.copied(batch)
    copied.clear()
    assert copied.name == "boxes"
    assert len(batch) == 1


# Objects


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("kind", [Slotted, lambda x: graphs.Graphs(x=x)])
def test_objects_are_copied_without_their_tensors(kind):
    batch = {"graphs": [kind(column())]}
    before = batch["graphs"][0]
    tensor = before.x
    copied = pytree.copied(batch)
    copied["graphs"].pop().x = None
    assert batch["graphs"] == [before]
    assert before.x is tensor


def test_objects_move_themselves_and_the_batch_stays_where_it_is():
    batch = {"graphs": graphs.Graphs(x=column()), "y": column(), "other": Slotted(column())}
    moved = pytree.to(batch, "meta", non_blocking=True)
    assert [moved["graphs"].x.device.type, moved["y"].device.type] == ["meta"] * 2
    assert [batch["graphs"].x.device.type, batch["y"].device.type] == ["cpu"] * 2
    assert moved["other"].x is batch["other"].x  # it has no `to`


class MovesItself:
    """Its `to` takes a device only, and returns nothing."""

    def __init__(self):
        self.x = column()

    def to(self, device):
        self.x = self.x.to(device)


def test_objects_may_move_in_place_and_take_a_device_only():
    batch = {"boxes": MovesItself()}
    moved = pytree.to(batch, "meta", non_blocking=True)
    assert moved["boxes"].x.device.type == "meta"
    assert batch["boxes"].x.device.type == "cpu"


def test_errors_of_a_method_to_are_raised():
    class Broken:
        def to(self, device, non_blocking=False):
            raise TypeError("a fault of its own")

    with pytest.raises(TypeError, match="a fault of its own"):
        pytree.to({"x": Broken()}, "meta", non_blocking=True)


def test_packed_sequences_keep_their_lengths_in_host_memory():
    packed = pytree.to({"x": pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])}, "meta")["x"]
    assert packed.data.device.type == "meta"
    assert packed.batch_sizes.device.type == "cpu"


class WithoutCopies:
    def __reduce__(self):
        raise NotImplementedError("no copies and no pickles")


def test_classes_modules_and_what_cannot_be_copied_are_passed_on(tmp_path):
    batch = [graphs.Graphs, nn.Linear(1, 1), math.sqrt, None, "to", 3, torch.float32]
    with open(tmp_path / "file", "w") as file:
        batch += [file, WithoutCopies()]
        for changed in (pytree.copied(batch), pytree.to(batch, "meta")):
            assert all(new is old for new, old in zip(changed, batch, strict=True))
    assert batch[1].weight.device.type == "cpu"


def test_arrays_in_files_are_not_read_to_copy_a_batch(tmp_path):
    array = numpy.memmap(tmp_path / "array", dtype="f4", mode="w+", shape=(4,))
    copied = pytree.copied({"x": column(), "array": array})["array"]
    assert copied is array
    assert arrays_in([array])[0] == [array]


def test_values_beside_tensors_take_no_memory_when_tensors_are_looked_for():
    batch = graphs.Graphs(x=column(), image=bytes(1 << 24))
    tracemalloc.start()
    try:
        arrays_in(batch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 22


def test_tensors_and_arrays_are_found_in_containers_and_objects():
    x, y, array = column(), column(), numpy.ones(2)
    objects, unknown = numpy.array([graphs.Graphs(x=y), None]), graphs.Graphs(x=lambda: None)
    batch = {"a": [Slotted({"x": x, "of": [x]}), "text"], "b": (array, UserDict(), {})}
    batch |= {"c": objects, "d": unknown, "e": nn.Linear(1, 1)}
    found, unpicklable = arrays_in(batch)
    assert [id(each) for each in found] == [id(x), id(array), id(y)]
    assert unpicklable == ["Graphs"]


# Values that are not tensors


def test_other_values_are_passed_on():
    marker = object()
    batch = {
        "x": column(),
        "name": "text",
        "none": None,
        "count": 4,
        "marker": marker,
        "scale": torch.tensor(0.5),
        "shape": torch.Size([1, 2, 3, 4]),
        "three": [1, 2, 3],
        "class": Batch,
    }
    first, second = pytree.split(batch, [1, 3])
    for part in (first, second):
        assert {key: part[key] for key in batch if key != "x"} == {
            key: batch[key] for key in batch if key != "x"
        }
        assert part["marker"] is marker


def test_lists_and_arrays_with_a_value_per_sample_are_split():
    numpy = pytest.importorskip("numpy")
    batch = {
        "x": column(),
        "texts": ["a", "b", "c", "d"],
        "spans": ((0, 1), (1, 2), (2, 3), (3, 4)),
        "array": numpy.arange(4),
    }
    first, second = pytree.split(batch, [1, 3])
    assert first["texts"] == ["a"]
    assert second["texts"] == ["b", "c", "d"]
    assert second["spans"] == ((1, 2), (2, 3), (3, 4))
    assert second["array"].tolist() == [1, 2, 3]


def test_list_of_tensors_is_a_container_of_any_length():
    batch = [torch.arange(2), torch.arange(2)]
    first, second = pytree.split(batch, [1, 1])
    assert [tensor.tolist() for tensor in first] == [[0], [0]]
    assert [tensor.tolist() for tensor in second] == [[1], [1]]


def test_named_tuple_of_strings_is_a_container_of_any_length():
    record = Pair("from", "to")
    (first, _) = pytree.split({"x": torch.arange(2), "record": record}, [1, 1])
    assert first["record"] == record


def test_tensors_are_listed_in_container_order():
    x, y, z = torch.tensor(1), torch.tensor([2]), torch.tensor([[3]])
    assert pytree.tensors({"b": [x, None], "a": Pair(y, {"c": z})}) == [x, y, z]
    assert pytree.tensors("nothing") == []


# Hugging Face


def test_batch_encoding_keeps_its_type():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": matrix(), "attention_mask": matrix()})
    assert pytree.samples_in(batch) == 4
    first, second = pytree.split(batch, [1, 3])
    assert type(first) is type(second) is transformers.BatchEncoding
    assert second["input_ids"].tolist() == matrix()[1:].tolist()
    assert second.attention_mask.shape == (3, 2)
    assert batch["input_ids"].shape == (4, 2)


def test_model_output_keeps_its_type():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    batch = outputs.BaseModelOutput(last_hidden_state=matrix(), hidden_states=(matrix(), matrix()))
    first, _ = pytree.split(batch, [1, 3])
    assert type(first) is outputs.BaseModelOutput
    assert first.last_hidden_state.shape == (1, 2)
    assert first["hidden_states"][1].shape == (1, 2)
    assert batch.last_hidden_state.shape == (4, 2)


# Invalid batches


def test_tensors_of_different_sizes_raise_and_are_named():
    batch = {"x": column(), "more": [Pair(column(), Batch(torch.ones(3, 5)))]}
    with pytest.raises(
        ValueError,
        match=r"batch\['more'\]\[0\]\.targets\.inputs has 3 samples \(shape \(3, 5\)\), "
        r"but batch\['x'\] has 4",
    ):
        pytree.samples_in(batch)


def ragged() -> list[torch.Tensor]:
    return [torch.ones(3, 2), torch.ones(2, 2)]


NOT_ROWS = {
    "images": lambda: ((torch.ones(3, 4), torch.ones(3, 5)), ({"boxes": torch.ones(2, 4)},)),
    "graph": lambda: {"x": torch.ones(9, 2), "edges": torch.ones(2, 20), "y": torch.ones(4)},
    "strided nested": lambda: [torch.nested.nested_tensor(ragged())],
    "jagged nested": lambda: {"x": torch.nested.nested_tensor(ragged(), layout=torch.jagged)},
    "sparse_coo": lambda: [torch.eye(3).to_sparse()],
    "sparse_csr": lambda: [torch.ones(3), torch.eye(3).to_sparse_csr()],
    "PackedSequence": lambda: {"x": pack_sequence(ragged()[:1])},
    "an object": object,
}


@pytest.mark.parametrize("name", NOT_ROWS)
@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*beta state")
def test_batches_that_are_not_split_along_dim_0_name_the_collation(name):
    with pytest.raises(ValueError, match=r"CollateMicroBatches\(collate, plan\)") as raised:
        pytree.samples_in(NOT_ROWS[name]())
    assert name in {"images", "graph", "an object"} or name.split()[-1] in str(raised.value)


def test_micro_batches_inside_of_another_batch_are_refused():
    """Each micro-batch would get all of them."""
    collated = MicroBatches([torch.ones(1, 2), torch.ones(1, 2)], (2,), torch.cat)
    for split in (lambda batch: pytree.split(batch, [1, 1]), lambda batch: pytree.take(batch, [0])):
        with pytest.raises(ValueError, match=r"batch\[0\] is a MicroBatches inside of another"):
            split((collated, torch.ones(2)))


@pytest.mark.parametrize("batch", [{}, "text", [1, 2], torch.tensor(1.0), {"x": None}])
def test_batch_without_tensors_raises(batch):
    with pytest.raises(ValueError, match="no tensor with a dim 0"):
        pytree.samples_in(batch)


@pytest.mark.parametrize("sizes", [[1, 2], [5], [5, -1], []])
def test_wrong_sizes_raise(sizes):
    with pytest.raises(ValueError, match="a batch of 4 samples cannot be split into"):
        pytree.split(column(), sizes)

"""What is read of a checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from poplar.checkpoint.files.opened import OpenedCheckpoint
from poplar.checkpoint.save_plan import digest
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
def test_tensor_of_another_dtype_than_described_is_not_read(tmp_path):
    dcp.save({"model": {"w": torch.full((4,), 1.7)}}, checkpoint_id=tmp_path, no_dist=True)
    opened = OpenedCheckpoint(tmp_path)
    opened.described["model.w"].properties.dtype = torch.int32
    with pytest.raises(DamagedCheckpoint, match=r"float32 .* describes torch\.int32"):
        opened.value("model.w")


def test_digests_are_equal_for_equal_values_only():
    values = [
        *(None, True, 1, 1.5, "1", b"1", (), {}, [1, 2], {"a": 1}, {"a": {"b": [1, "c"]}}),
        *(torch.arange(3), torch.arange(3.0), torch.zeros(3, 1), torch.zeros(1, 3)),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": torch.ones(2), "b": 1}) == digest({"b": 1, "a": torch.ones(2)})
    assert digest([1, 2]) == digest((1, 2)), "containers of one content are alike"
    assert digest(object()) == digest(object()), "of other objects, only the type is compared"

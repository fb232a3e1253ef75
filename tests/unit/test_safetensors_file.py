"""Ranges of the tensors of a safetensors file, against the library."""

from __future__ import annotations

import json
import multiprocessing
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from poplar.checkpoint.saved_model import Writer
from poplar.zero.weights.weight_files import DTYPES, SafetensorsFile, WeightFiles


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name} {shape}": (torch.randn(shape, generator=generator) * 4).to(dtype)
        for dtype, name in DTYPES.items()
        for shape in ((), (0,), (3, 0), (7,), (3, 1, 5))
    }
    path = tmp_path_factory.mktemp("files") / "every dtype.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


@given(data=st.data())
def test_any_range_has_the_elements_that_the_library_reads(path, data):
    file, expected = SafetensorsFile(path), load_file(path)
    assert file.tensors.keys() == expected.keys()
    name = data.draw(st.sampled_from(sorted(expected)))
    flat = expected[name].reshape(-1)
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(0, len(flat) + 1))
    read = file.read(name, start, stop)
    assert read.dtype == flat.dtype
    assert torch.equal(read.view(torch.uint8), flat[start:stop].clone().view(torch.uint8))
    assert file.tensors[name].shape == tuple(expected[name].shape)


@pytest.mark.parametrize("bytes_left", [0, 4, 200, -1])
def test_a_truncated_file_is_refused(path, tmp_path, bytes_left):
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(path.read_bytes()[:bytes_left])
    with pytest.raises(ValueError, match=r"cannot read .*truncated\.safetensors as safetensors"):
        SafetensorsFile(truncated)


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path):
    path = tmp_path / "shrinks.safetensors"
    save_file({"a": torch.ones(100)}, path)
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(OSError, match=r"shrinks\.safetensors ends at byte .* inside 'a'"):
        file.read("a", 50, 100)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_every_dtype_is_written_as_the_library_writes_it(tmp_path, dtype):
    values = (torch.randn(5, 2) * 4).to(dtype)
    if dtype.is_complex:
        values = values.conj()  # lazily
    writer = Writer(tmp_path / "own.safetensors", [("a", values)], {})
    writer.write("a", values)
    writer.finish()
    writer.publish()
    save_file({"a": values.clone().resolve_conj()}, tmp_path / "library.safetensors")
    own, library = (
        load_file(tmp_path / "own.safetensors"),
        load_file(tmp_path / "library.safetensors"),
    )
    assert torch.equal(own["a"].view(torch.uint8), library["a"].view(torch.uint8))
    assert WeightFiles(tmp_path / "own.safetensors").read_whole("a").dtype == dtype


def test_an_unknown_dtype_is_named(tmp_path):
    header = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "other.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(ValueError, match=r"other\.safetensors.*F8_E8M0"):
        SafetensorsFile(path).read("a", 0, 2)


def test_a_file_may_be_larger_than_the_memory_limit(tmp_path):
    path = tmp_path / "large.safetensors"
    save_file({"a": torch.arange(64 << 20, dtype=torch.int32)}, path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(read_within_a_limit, (path,)) == [(32 << 20) + i for i in range(3)]


def read_within_a_limit(path: Path) -> list[int]:
    held = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (held + (64 << 20), resource.RLIM_INFINITY))
    middle = 32 << 20
    return SafetensorsFile(path).read("a", middle, middle + 3).tolist()

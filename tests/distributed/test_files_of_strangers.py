"""Files that others have made: nothing in them runs, and errors name the file."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Pool
from safetensors.torch import save_file
from test_checkpoint_safety import TWO, save_two
from test_checkpoints import build
from torch.distributed.checkpoint.metadata import MetadataIndex

import poplar
from poplar import Plan
from poplar._core import crc32c
from poplar.checkpoint.files.opened import OpenedCheckpoint
from poplar.hardware.cluster_file import ClusterFile
from poplar.values.errors import DamagedCheckpoint
from poplar.values.formatting import printable
from poplar.values.profile import ClusterProfile
from poplar.zero.weights.weight_files import WeightFiles

MANIFEST, METADATA = "poplar.json", ".metadata"


@pytest.fixture(scope="module")
def saved(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks.run(save_two, str(folder), ranks=2)
    return folder / "saved"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def sign(folder: Path, content: dict[str, Any] | None = None) -> None:
    """Write a manifest with right checksums for the files as they are, as a forger does."""
    if content is None:
        content = json.loads((folder / MANIFEST).read_text())
        for name, stored in content["files"].items():
            data = (folder / name).read_bytes()
            stored[:] = len(data), crc32c(data)
    content.pop("crc32c", None)
    text = json.dumps(content, sort_keys=True)
    (folder / MANIFEST).write_text(f'{{"crc32c": {crc32c(text.encode())}, {text[1:]}\n')


def refused(folder: Path, file: str) -> str:
    """What is said of a damaged checkpoint; it names the file."""
    with pytest.raises(DamagedCheckpoint) as caught:
        OpenedCheckpoint(folder).verify()
    assert file in str(caught.value)
    return str(caught.value)


class Call:
    """A value whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def hidden_in(metadata: Any, value: Any, place: str) -> Any:
    """Metadata with a value in one of its places."""
    if place == "instead":
        return value
    if place == "path":
        return dataclasses.replace(metadata, planner_data={**metadata.planner_data, "x": value})
    if place == "description":
        described = {**metadata.state_dict_metadata, "x": value}
        return dataclasses.replace(metadata, state_dict_metadata=described)
    index = MetadataIndex("x")
    object.__setattr__(index, "index", value)
    return dataclasses.replace(metadata, storage_data={index: metadata.storage_data})


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("place", ["instead", "path", "description", "index"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_runs_nothing(copy: Path, signed: bool, place: str, protocol: int) -> None:
    mark = copy.parent / "ran"
    calls = (
        Call(os.system, f"touch {mark}"),
        Call(exec, f"open({str(mark)!r}, 'w')"),
        Call(builtins.getattr, Call(__import__, "os"), "system"),
        Call(torch.load, str(mark)),
    )
    content = pickle.loads((copy / METADATA).read_bytes())
    for call in calls:
        hidden = hidden_in(content, call, place)
        (copy / METADATA).write_bytes(pickle.dumps(hidden, protocol))
        sign(copy) if signed else (copy / MANIFEST).unlink(missing_ok=True)
        assert "not the metadata of a checkpoint" in refused(copy, METADATA)
    assert not mark.exists()


def save_object(folder: str, mark: str) -> list[harness.Failure]:
    """Save a value that runs code, and load it."""
    _, optimizer = build(TWO)
    poplar.save_checkpoint(folder, optimizer, state={"note": Call(open, mark, "w")})
    with harness.catching() as caught:
        poplar.load_checkpoint(folder, optimizer)
    assert not Path(mark).exists()
    with harness.catching() as trusted:
        poplar.load_checkpoint(folder, optimizer, weights_only=False)
    assert Path(mark).exists(), trusted
    return caught


def test_values_run_nothing_unless_they_are_trusted(ranks: Pool, tmp_path: Path) -> None:
    folder, mark = tmp_path / "saved", tmp_path / "ran"
    for (failure,) in ranks.run(save_object, str(folder), str(mark), ranks=2):
        assert "__0_0.distcp: the value at byte" in failure.message
        assert "open, which may run any code" in failure.message
    mark.unlink()
    opened = OpenedCheckpoint(folder)
    opened.verify()
    with pytest.raises(ValueError, match=r"__0_0\.distcp"):
        opened.value("poplar.state.note")
    assert not mark.exists()


@pytest.mark.parametrize("name", [MANIFEST, METADATA, "__1_0.distcp"])
@pytest.mark.parametrize("kind", ["folder", "outside", "missing"])
def test_other_files_than_those_inside_the_folder_are_refused(
    copy: Path, name: str, kind: str
) -> None:
    path, aside = copy / name, copy.parent / "outside"
    path.rename(aside)
    if kind == "folder":
        path.mkdir()
    elif kind == "outside":
        path.symlink_to(aside)
    refused(copy, name)


def test_a_link_to_the_folder_and_links_inside_are_followed(copy: Path) -> None:
    (copy / "data").mkdir()
    (copy / "__0_0.distcp").rename(copy / "data" / "first")
    (copy / "__0_0.distcp").symlink_to("data/first")
    (copy.parent / "latest").symlink_to(copy)
    OpenedCheckpoint(copy.parent / "latest").verify()


def change(copy: Path, *keys: Any, value: Any) -> None:
    content = json.loads((copy / MANIFEST).read_text())
    found = content
    for key in keys[:-1]:
        found = found[key]
    found[keys[-1]] = value
    sign(copy, content)


DATA = ("files", "__0_0.distcp")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        *(((*DATA, 0), value) for value in (-1, 0.5, "0", None, 1 << 64, True, [])),
        *(((*DATA, 1), value) for value in (-1, 0, "1", None, 1 << 64)),
        *((("files", "__0_0.distcp"), value) for value in (5, None, [5], [[1]], [], {"a": 1})),
        *((("files", name), [1, 0]) for name in ("/etc/hostname", "../x", "", ".")),
        *(
            ((name,), value)
            for name in ("files", "versions", "computes_in")
            for value in (5, [], "")
        ),
        *((("computes_in",), {"x": value}) for value in (5, [])),
        *((("step",), value) for value in (-1, True, "1")),
        *((("state",), value) for value in (5, [5], "a", None)),
        (("more",), 1),
    ],
)
def test_fields_of_the_manifest_are_checked(copy: Path, keys: Any, value: Any) -> None:
    change(copy, *keys, value=value)
    refused(copy, str(copy))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "1", "", "\ufeff{}", '{"version": 1e999}'])
def test_a_manifest_of_another_form_is_refused(copy: Path, text: str) -> None:
    (copy / MANIFEST).write_text(text)
    assert "not a manifest" in refused(copy, MANIFEST)


@pytest.mark.parametrize("kind", ["folder", "nested", "outside", "absolute"])
def test_weights_of_other_forms_are_refused(tmp_path: Path, kind: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    part = tmp_path / "part.safetensors"
    save_file({"a": torch.ones(2)}, part)
    place: Any = {"outside": "../part.safetensors", "absolute": str(part)}.get(kind, part.name)
    index.write_text(json.dumps({"weight_map": {"a": place}}))
    if kind == "folder":
        part.unlink()
        part.mkdir()
    elif kind == "nested":
        index.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=tmp_path.name):
        WeightFiles(index)


@pytest.mark.parametrize("read", [Plan.from_json, ClusterProfile.from_json, ClusterFile.read])
def test_documents_that_are_nested_too_deeply_are_refused(
    tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    path = tmp_path / "document"
    path.write_text(("a = " if read == ClusterFile.read else "") + "[" * 100_000)
    with pytest.raises(ValueError, match=str(path)):
        read(path)


def test_weights_behind_the_links_of_a_cache_are_read(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    assert torch.equal(WeightFiles(tmp_path / "snapshot").read_whole("a"), torch.ones(2))


def test_control_characters_do_not_reach_the_terminal(copy: Path) -> None:
    assert printable("a\tb\n\x1b]0;x\x07\x9b2J\u202e\x7fé") == (
        "a\tb\n\\x1b]0;x\\x07\\x9b2J\\u202e\\x7fé"
    )
    change(copy, "files", "\x1b[2J", value=[1, 0])
    assert "\\x1b[2J" in refused(copy, "2J")

"""Files that others have made: nothing in them runs, nothing waits, and errors name the file."""

from __future__ import annotations

import builtins
import copyreg
import dataclasses
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Pool
from safetensors.torch import save_file
from subset import choose
from test_checkpoint_safety import TWO, save_two
from test_checkpoints import build
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from typer.testing import CliRunner

import poplar
from poplar import Plan
from poplar._core import crc32c
from poplar.checkpoint.conversion import convert
from poplar.checkpoint.files.opened import OpenedCheckpoint
from poplar.cli.app import app
from poplar.hardware.cluster_file import ClusterFile
from poplar.values.errors import DamagedCheckpoint
from poplar.values.formatting import printable
from poplar.values.profile import ClusterProfile
from poplar.zero.weights.weight_files import WeightFiles

MANIFEST, METADATA = "poplar.json", ".metadata"
SECONDS = 120.0


@pytest.fixture(scope="module")
def saved(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks.run(save_two, str(folder), ranks=2)
    return folder / "saved"


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    """An error where a test waits for a file that nobody writes."""

    def stop(*_: Any) -> None:
        raise AssertionError("it waited")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, choose(quick=SECONDS, full=3000.0))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


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


@pytest.mark.parametrize("place", ["instead", "path", "description", "index"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_runs_nothing(copy: Path, place: str, protocol: int) -> None:
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
        sign(copy)
        assert "which is no part of metadata; nothing ran" in refused(copy, METADATA)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [(Metadata.__module__, "Metadata"), ("torch.serialization", "_get_layout"), ("torch", "int8")],
)
def test_metadata_sets_no_attributes_of_classes_and_functions(
    copy: Path, module: str, name: str
) -> None:
    state = (pickle.NONE, pickle.EMPTY_DICT, pickle.UNICODE + b"planted\n", pickle.NEWTRUE)
    build = b"".join((*state, pickle.SETITEM, pickle.TUPLE2, pickle.BUILD, pickle.STOP))
    (copy / METADATA).write_bytes(b"".join((pickle.GLOBAL, f"{module}\n{name}\n".encode(), build)))
    sign(copy)
    assert "the state of a" in refused(copy, METADATA)
    assert not hasattr(Metadata, "planted")
    assert not hasattr(torch.serialization._get_layout, "planted")


def test_metadata_uses_no_class_that_another_pickle_has_looked_up(copy: Path) -> None:
    copyreg.add_extension("builtins", "exec", 200)
    try:
        assert pickle.loads(pickle.dumps(exec, 2)) is exec
        (copy / METADATA).write_bytes(pickle.dumps(exec, 2))
        sign(copy)
        assert "nothing ran" in refused(copy, METADATA)
    finally:
        copyreg.remove_extension("builtins", "exec", 200)


@pytest.mark.parametrize("content", [b"", b"\x80\x04" + b"(" * 1000 + b".", pickle.dumps([1])])
def test_metadata_of_other_content_is_refused(copy: Path, content: bytes) -> None:
    (copy / METADATA).write_bytes(content)
    (copy / MANIFEST).unlink()  # as of torch.distributed.checkpoint
    assert "not the metadata of a checkpoint" in refused(copy, METADATA)


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
    OpenedCheckpoint(folder).verify()
    convert(folder, tmp_path / "weights.safetensors", "safetensors")
    with pytest.raises(ValueError, match=r"__0_0\.distcp"):
        convert(folder, tmp_path / "all.pt", "torch")
    assert not mark.exists()


@pytest.mark.parametrize("name", [MANIFEST, METADATA, "__1_0.distcp"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "outside", "loop", "huge", "socket"])
def test_other_files_than_regular_ones_inside_the_folder_are_refused(
    copy: Path, name: str, kind: str
) -> None:
    path, aside = copy / name, copy.parent / "outside"
    if kind == "huge":
        os.truncate(path, 1 << 40)
    else:
        path.rename(aside)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o140666)
    elif kind in ("device", "outside", "loop"):
        path.symlink_to({"device": "/dev/zero", "outside": aside, "loop": path}[kind])
    refused(copy, name)
    if name == METADATA:
        (copy / MANIFEST).unlink()  # as of torch.distributed.checkpoint
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
        ((*DATA, 0), -1),
        ((*DATA, 0), "0"),
        ((*DATA, 1), 0),
        (DATA, [5]),
        (("files", "../x"), [1, 0]),
        (("files", "\0"), [1, 0]),
        (("files",), []),
        (("computes_in",), {"x": "load"}),
        (("version",), "1"),
        (("step",), True),
        (("state",), 5),
        (("more",), 1),
    ],
)
def test_fields_of_the_manifest_are_checked(copy: Path, keys: Any, value: Any) -> None:
    change(copy, *keys, value=value)
    refused(copy, str(copy))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", ""])
def test_a_manifest_of_another_form_is_refused(copy: Path, text: str) -> None:
    (copy / MANIFEST).write_text(text)
    assert "not a manifest" in refused(copy, MANIFEST)


def test_shapes_and_places_that_do_not_fit_are_refused(copy: Path) -> None:
    content = (copy / METADATA).read_bytes()
    name = next(n for n in pickle.loads(content).state_dict_metadata if n.startswith("model."))

    def with_tensor(metadata: Any, **changes: Any) -> None:
        found = metadata.state_dict_metadata[name]
        metadata.state_dict_metadata[name] = dataclasses.replace(found, **changes)

    def with_place(metadata: Any, **changes: Any) -> None:
        for found in metadata.storage_data:
            if found.fqn == name:
                place = metadata.storage_data[found]
                metadata.storage_data[found] = dataclasses.replace(place, **changes)

    def chunks(metadata: Any) -> Any:
        return metadata.state_dict_metadata[name].chunks

    def with_parts_that_overlap(metadata: Any) -> None:
        """As many elements as the tensor has, of which one is stored twice and one is not."""
        for start in (0, 1):
            index = MetadataIndex(name, torch.Size([start]), start)
            metadata.storage_data[index] = next(iter(metadata.storage_data.values()))
        parts = [ChunkStorageMetadata(torch.Size([start]), torch.Size([2])) for start in (0, 1)]
        with_tensor(metadata, size=torch.Size([4]), chunks=parts)

    changes: list[Callable[[Any], Any]] = [
        lambda m: with_tensor(m, size=torch.Size([1 << 40, 1 << 20])),
        lambda m: with_tensor(m, chunks=[]),
        lambda m: with_tensor(m, chunks=chunks(m) * 2),
        lambda m: chunks(m).__setitem__(0, dataclasses.replace(chunks(m)[0], offsets=(1, 0))),
        with_parts_that_overlap,
        lambda m: with_place(m, offset=-1),
        lambda m: with_place(m, offset=1 << 63),
        lambda m: with_place(m, relative_path="../../etc/passwd"),
        lambda m: with_place(m, relative_path=5),
        lambda m: m.planner_data.update({name: ()}),
        lambda m: m.planner_data.update({name: ("model", 1 << 40)}),
        lambda m: setattr(m, "storage_data", None),
    ]
    for damage in changes:
        metadata = pickle.loads(content)
        damage(metadata)
        (copy / METADATA).write_bytes(pickle.dumps(metadata))
        sign(copy)
        refused(copy, METADATA)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "nested", "outside", "absolute"])
def test_weights_of_other_forms_are_refused(tmp_path: Path, kind: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    part = tmp_path / "part.safetensors"
    save_file({"a": torch.ones(2)}, part)
    place: Any = {"outside": "../part.safetensors", "absolute": str(part)}.get(kind, part.name)
    index.write_text(json.dumps({"weight_map": {"a": place}}))
    if kind in ("fifo", "device", "folder"):
        part.unlink()
    if kind == "fifo":
        os.mkfifo(part)
    elif kind == "device":
        part.symlink_to("/dev/zero")
    elif kind == "folder":
        part.mkdir()
    elif kind == "nested":
        index.write_text("[" * 100_000)
    for path in (index, part) if kind in ("fifo", "device", "folder") else (index,):
        with pytest.raises(ValueError, match=tmp_path.name):
            WeightFiles(path)
    if kind == "fifo":
        index.unlink()
        os.mkfifo(index)
        with pytest.raises(ValueError, match="not a regular file"):
            WeightFiles(index)


@pytest.mark.parametrize("read", [Plan.from_json, ClusterProfile.from_json, ClusterFile.read])
def test_documents_of_other_forms_are_refused(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    path = tmp_path / "document"
    nested = "[" * 100_000 if read is not ClusterFile.read else "a = " + "[" * 100_000
    path.write_text(nested)
    with pytest.raises(ValueError, match=str(path)):
        read(path)
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match=str(path)):
        read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
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
    change(copy, "optimizer", value="\x1b[2JAdamW")
    shown = CliRunner().invoke(app, ["checkpoint", "inspect", str(copy)]).output
    assert "\\x1b[2JAdamW" in shown
    change(copy, "files", "\x1b[2J", value=[1, 0])
    result = CliRunner().invoke(app, ["checkpoint", "inspect", str(copy), "--debug"])
    assert "\\x1b[2J" in result.output
    assert "\x1b" not in shown + result.output

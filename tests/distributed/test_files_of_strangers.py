"""Files that others have made: nothing in them runs, nothing waits, and errors name the file."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mutated_checkpoints as mutated
import pybind11
import pytest
import ranks as harness
import torch
from mutated_checkpoints import MANIFEST, METADATA, outcome, sign
from ranks import Pool
from safetensors.torch import save_file
from subset import choose
from test_checkpoint_safety import TWO, save_two
from test_checkpoints import build
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from typer.testing import CliRunner

import poplar
from poplar import Plan
from poplar.checkpoint.conversion import convert
from poplar.checkpoint.files.opened import OpenedCheckpoint
from poplar.cli.app import app
from poplar.hardware.cluster_file import ClusterFile
from poplar.values.errors import DamagedCheckpoint
from poplar.values.formatting import printable
from poplar.values.profile import ClusterProfile
from poplar.zero.weights.weight_files import WeightFiles

ROOT = Path(__file__).resolve().parents[2]
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


def nested_tuple(depth: int) -> tuple[Any, ...]:
    """A small pickle of which the hash and the text take exponential time."""
    value: tuple[Any, ...] = ()
    for _ in range(depth):
        value = (value, value)
    return value


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
        Call(torch.Size, nested_tuple(60)),
        nested_tuple(60),
    )
    content = pickle.loads((copy / METADATA).read_bytes())
    for call in calls:
        hidden = hidden_in(content, call, place)
        (copy / METADATA).write_bytes(pickle.dumps(hidden, protocol))
        sign(copy) if signed else (copy / MANIFEST).unlink(missing_ok=True)
        assert "not the metadata of a checkpoint" in refused(copy, METADATA)
    assert not mark.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x04N\x8e\xff\xff\xff\xff\xff\xff\x00\x00.",  # bytes of a length that the file lacks
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a memo of 16 GiB
        b"\x80\x04" + b"(" * 100_000 + b".",
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        b"",
    ],
)
def test_metadata_reserves_nothing_for_what_it_claims(copy: Path, pickled: bytes) -> None:
    (copy / METADATA).write_bytes(pickled)
    sign(copy)
    refused(copy, METADATA)


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
        *(((*DATA, 0), value) for value in (-1, 0.5, "0", None, 1 << 64, True, [])),
        *(((*DATA, 1), value) for value in (-1, 0, "1", None, 1 << 64)),
        *((("files", "__0_0.distcp"), value) for value in (5, None, [5], [[1]], [], {"a": 1})),
        *((("files", name), [1, 0]) for name in ("/etc/hostname", "../x", "", "\0", ".")),
        *(
            ((name,), value)
            for name in ("files", "versions", "computes_in")
            for value in (5, [], "")
        ),
        *((("computes_in",), {"x": value}) for value in ("load", "no", 5, [])),
        *((("version",), value) for value in (-1, 0, True, 0.5, "1", None, [])),
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


def test_shapes_and_places_that_do_not_fit_are_refused(copy: Path) -> None:
    content = (copy / METADATA).read_bytes()
    name = next(n for n in pickle.loads(content).state_dict_metadata if n.startswith("model."))
    index = MetadataIndex(name, None)

    def with_tensor(metadata: Any, **changes: Any) -> None:
        found = metadata.state_dict_metadata[name]
        metadata.state_dict_metadata[name] = dataclasses.replace(found, **changes)

    def with_place(metadata: Any, **changes: Any) -> None:
        for found in metadata.storage_data:
            if found.fqn == index.fqn:
                place = metadata.storage_data[found]
                metadata.storage_data[found] = dataclasses.replace(place, **changes)

    def chunks(metadata: Any) -> Any:
        return metadata.state_dict_metadata[name].chunks

    changes: list[Callable[[Any], Any]] = [
        lambda m: with_tensor(m, size=torch.Size([1 << 40, 1 << 20])),
        lambda m: with_tensor(m, chunks=[]),
        lambda m: with_tensor(m, chunks=chunks(m) * 2),
        lambda m: chunks(m).__setitem__(0, dataclasses.replace(chunks(m)[0], offsets=(1, 0))),
        lambda m: with_place(m, offset=-1),
        lambda m: with_place(m, offset=1 << 63),
        lambda m: with_place(m, length=8),
        lambda m: with_place(m, relative_path="../../etc/passwd"),
        lambda m: with_place(m, relative_path=5),
        lambda m: m.storage_data.clear(),
        lambda m: m.state_dict_metadata.update({"more": BytesStorageMetadata()}),
        lambda m: m.planner_data.update({name: ("model", 1 << 40)}),
        lambda m: m.planner_data.update({name: ()}),
        lambda m: setattr(m, "planner_data", None),
        lambda m: setattr(m, "storage_data", None),
    ]
    for number, damage in enumerate(changes):
        metadata = pickle.loads(content)
        damage(metadata)
        (copy / METADATA).write_bytes(pickle.dumps(metadata))
        sign(copy)
        assert outcome(copy) == "DamagedCheckpoint", number


def test_mutated_checkpoints_are_read_or_refused(saved: Path) -> None:
    outcomes = mutated.read_mutated(saved, choose(quick=60, full=2000))
    assert outcomes["DamagedCheckpoint"] > outcomes["read"] > 0


@pytest.mark.full
@pytest.mark.slow
def test_mutated_checkpoints_under_address_sanitizer(saved: Path, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    libraries = [  # the second one, because the first one looks for its functions at the start
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    core = tmp_path / "_core.so"
    headers = [pybind11.get_include(), sysconfig.get_path("include"), str(ROOT / "csrc/include")]
    options = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-fsanitize=address"]
    sources = map(str, sorted((ROOT / "csrc/core").glob("*.cpp")))
    subprocess.run(
        ["g++", *options, *(f"-I{path}" for path in headers), "-o", str(core), *sources],
        check=True,
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/mutated_checkpoints.py"), str(saved), "2000", "1"],
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "POPLAR_CORE": str(core),
            "POPLAR_OPS": "off",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "AddressSanitizer" not in done.stderr
    assert "DamagedCheckpoint" in done.stdout


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

"""Checkpoints as no rank writes them: files with wrong bytes, fields of wrong types and sizes.

    python tests/mutated_checkpoints.py CHECKPOINT COUNT [SEED]

reads mutated copies of a checkpoint of two ranks in every way in which Poplar reads one. Each copy
is read, or refused with an error that names the file. POPLAR_CORE is another build of the core:
tests/distributed/test_files_of_strangers.py takes one with AddressSanitizer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

if core := os.environ.get("POPLAR_CORE"):
    spec = importlib.util.spec_from_file_location("poplar._core", core)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["poplar._core"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["poplar._core"])

import poplar
from poplar._core import crc32c
from poplar.checkpoint.conversion import convert
from poplar.checkpoint.files.opened import OpenedCheckpoint

MANIFEST, METADATA = "poplar.json", ".metadata"
ODD = (
    *(-1, 0, 1, 63, 64, 1 << 20, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30),
    *(0.5, float("nan"), True, None, "", "x", "\x1b[2J", "../../etc/passwd", "/dev/zero", "\0"),
    *(
        [],
        [[]],
        {},
        {"a": 1},
        (),
        torch.Size([1 << 40, 1 << 20]),
        torch.int8,
        torch.qint8,
        torch.int4,
        torch.complex128,
    ),
    *(MetadataIndex("model.0.weight", [0, 0]), _StorageInfo("__0_0.distcp", 5, 1 << 40)),
)


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


def mutate_bytes(folder: Path, draw: random.Random) -> None:
    """Change, remove, repeat or insert bytes of one file; mostly with right checksums."""
    path = folder / draw.choice([METADATA, METADATA, MANIFEST, "__0_0.distcp", "__1_0.distcp"])
    data = bytearray(path.read_bytes())
    place, length = draw.randrange(len(data)), draw.choice([1, 1, 3, 100])
    how = draw.randrange(4)
    if how == 0:
        for _ in range(length):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif how == 1:
        del data[place : place + length * draw.choice([1, 1000])]
    elif how == 2:
        data[place:place] = draw.randbytes(length)
    else:
        data[place : place + length] = data[draw.randrange(len(data)) :][:length]
    path.write_bytes(data)
    if path.name != MANIFEST and draw.random() < 0.9:
        sign(folder)
    elif draw.random() < 0.3:
        (folder / MANIFEST).unlink(missing_ok=True)


def mutate_manifest(folder: Path, draw: random.Random) -> None:
    """Replace one value of the manifest."""
    content = json.loads((folder / MANIFEST).read_text())
    found: Any = content
    while True:
        key = draw.choice(list(found if isinstance(found, dict) else range(len(found))))
        if not isinstance(found[key], (dict, list)) or not found[key] or draw.random() < 0.1:
            break
        found = found[key]
    while True:
        found[key] = draw.choice(ODD)
        try:
            return sign(folder, content)
        except TypeError:  # not a JSON type
            continue


def mutate_metadata(folder: Path, draw: random.Random) -> None:
    """Replace one value of the metadata."""
    content = pickle.loads((folder / METADATA).read_bytes())
    (folder / METADATA).write_bytes(pickle.dumps(_mutated(content, draw)))
    sign(folder)
    if draw.random() < 0.1:
        (folder / MANIFEST).unlink()


def _mutated(value: Any, draw: random.Random) -> Any:
    if isinstance(value, (dict, list, tuple)) and value and draw.random() < 0.95:
        if isinstance(value, dict):
            key = draw.choice(list(value))
            if draw.random() < 0.05:
                return {k: v for k, v in value.items() if k != key}
            return {**value, key: _mutated(value[key], draw)}
        entries = list(value)
        number = draw.randrange(len(entries))
        entries[number] = _mutated(entries[number], draw)
        try:
            return type(value)(entries)
        except TypeError:  # a torch.Size of numbers that are none
            return tuple(entries)
    if is_dataclass(value) and fields(value) and draw.random() < 0.95:
        name = draw.choice(fields(value)).name
        object.__setattr__(value, name, _mutated(getattr(value, name), draw))
        return value
    return draw.choice(ODD)


MUTATIONS = (mutate_bytes, mutate_manifest, mutate_metadata)


def outcome(folder: Path) -> str:
    """Read a checkpoint in every way; "read", or the type of the error with which it is refused."""
    try:
        opened = OpenedCheckpoint(folder)
        opened.verify()
        with tempfile.TemporaryDirectory() as scratch:
            convert(folder, Path(scratch, "all.pt"), "torch")
            convert(folder, Path(scratch, "weights.safetensors"), "safetensors")
    except (poplar.PoplarError, ValueError, OSError) as error:
        if str(folder) in str(error):
            return type(error).__name__
        raise
    except TypeError as error:
        if "which safetensors cannot store" in str(error):
            return "not for safetensors"
        raise
    return "read"


def read_mutated(checkpoint: Path, count: int, seed: int = 0) -> Counter[str]:
    """Mutate a checkpoint `count` times and read each copy; the outcomes."""
    draw, outcomes = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(count):
            folder = Path(scratch, str(number))
            shutil.copytree(checkpoint, folder)
            for _ in range(draw.choice([1, 1, 1, 3])):
                if (folder / MANIFEST).exists():
                    mutation = draw.choice(MUTATIONS)
                    try:
                        mutation(folder, draw)
                    except Exception:  # an earlier mutation left nothing to mutate
                        break
            try:
                outcomes[outcome(folder)] += 1
            except Exception as error:
                raise AssertionError(f"mutation {number} of seed {seed}") from error
            shutil.rmtree(folder)
    return outcomes


if __name__ == "__main__":
    print(dict(read_mutated(Path(sys.argv[1]), int(sys.argv[2]), int((*sys.argv, 0)[3]))))

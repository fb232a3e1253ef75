"""Reads the weights of a model from safetensors: one file, or several with an index.

Only the elements that a rank keeps are read. Names, shapes and files are checked before anything is
read, so that a wrong file changes nothing. The library checks the header of a file; elements are
read here, because the library maps files as private, writable memory, so that it cannot open a file
that is larger than a memory limit, and reads whole rows.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from torch import Tensor, nn

from poplar.values.canonical_name import canonical
from poplar.values.formatting import format_names
from poplar.values.regular_files import open_regular, read_regular
from poplar.values.schema import parse_json

DTYPES: Mapping[torch.dtype, str] = {d: name for name, d in _TYPES.items() if d is not None}
"""Names of dtypes in headers, as far as the installed version of the library knows them."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_INDEX_BYTES = 64 << 20
"""More than the index of any model has."""
_SAMPLE = 8
"""Elements at each of three places of a tensor, by which files of different ranks are compared."""
_LISTED = 5
"""Names in an error message."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""


class SafetensorsFile:
    """The tensors of one file, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                # The library checks names, places, the sizes of header and file, and nesting.
                with safe_open(path, framework="np"):
                    pass
                header_bytes = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(header_bytes))
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"cannot read {path} as safetensors ({error}); it is missing, truncated or of "
                "another format"
            ) from error
        header.pop("__metadata__", None)
        self.tensors = {
            name: StoredTensor(
                entry["dtype"], tuple(entry["shape"]), 8 + header_bytes + entry["data_offsets"][0]
            )
            for name, entry in header.items()
        }

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `[start, stop)` of a flattened tensor, on the CPU.

        Raises:
            OSError: the file cannot be read, or has become shorter.
            ValueError: its dtype is not supported.
        """
        stored = self.tensors[name]
        if (dtype := _TYPES.get(stored.dtype)) is None:
            raise ValueError(
                f"{name!r} in {self.path} has the dtype {stored.dtype}; supported are "
                f"{', '.join(DTYPES.values())}"
            )
        start, stop = max(0, start), min(stop, math.prod(stored.shape))
        values = torch.empty(max(0, stop - start), dtype=dtype, device="cpu")
        buffer = values.view(torch.uint8).numpy().data
        place = stored.begin + start * values.itemsize
        with os.fdopen(open_regular(self.path), "rb", buffering=0) as file:
            while buffer:
                count = os.preadv(file.fileno(), [buffer], place)
                if not count:
                    raise OSError(f"{self.path} ends at byte {place}, inside {name!r}")
                buffer, place = buffer[count:], place + count
        return values


class WeightFiles:
    """The tensors of one model in safetensors files."""

    def __init__(self, path: str | Path) -> None:
        """
        Args:
            path: a file, an index as Hugging Face writes it, or a folder that holds either.

        Raises:
            ValueError: there is no such file, or it is truncated or not in this format.
        """
        self.path = Path(path)
        self._files: dict[str, tuple[SafetensorsFile, str]] = {}
        """By canonical name, the file of a tensor and its name there."""
        for path, names in _contents(_file_in(self.path)).items():
            file = SafetensorsFile(path)
            for name in sorted(file.tensors) if names is None else names:
                if name not in file.tensors:
                    raise ValueError(f"{path} has no tensor {name!r}, which its index places there")
                self._files[canonical(name)] = file, name

    def _stored(self, name: str) -> StoredTensor:
        file, own = self._files[name]
        return file.tensors[own]

    def names_of(self, model: nn.Module) -> dict[int, str]:
        """The name here of each parameter and persistent buffer of the model, by its `id`.

        A tied parameter needs one of its names. It raises if names are missing, unexpected, or have
        another shape or kind of dtype.
        """
        expected = dict(_expected(model))
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        unexpected = [
            name
            for name in self._files.keys() - expected.keys() - _unsaved_buffers(model)
            if not any(re.search(pattern, name) for pattern in ignored)
        ]
        stored: dict[int, str] = {}
        for name, tensor in expected.items():
            if name in self._files:
                stored.setdefault(id(tensor), name)
        missing = [name for name, tensor in expected.items() if id(tensor) not in stored]
        if missing or unexpected:
            raise ValueError(
                f"the weights in {self.path} are not those of this model: missing "
                f"{format_names(missing)}, unexpected {format_names(sorted(unexpected))}"
            )
        wrong = [
            f"{name!r} is {self._stored(name).dtype} {self._stored(name).shape} in "
            f"{self._files[name][0].path.name} and {tensor.dtype} {tuple(tensor.shape)} in the "
            "model"
            for name, tensor in expected.items()
            if name in self._files and not self._fits(name, tensor)
        ]
        if wrong:
            raise ValueError(
                f"the weights in {self.path} are not those of this model: "
                f"{'; '.join(wrong[:_LISTED])}"
            )
        return stored

    def _fits(self, name: str, tensor: Tensor) -> bool:
        dtype, shape, _ = self._stored(name)
        return (
            shape == tuple(tensor.shape)
            and dtype.startswith(("F", "BF")) == tensor.is_floating_point()
            and dtype.startswith("C") == tensor.is_complex()
        )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `[start, stop)` of a flattened tensor."""
        file, own = self._files[name]
        return file.read(own, start, stop)

    def read_whole(self, name: str) -> Tensor:
        """One tensor."""
        shape = self._stored(name).shape
        return self.read(name, 0, math.prod(shape)).reshape(shape)

    def identity(self) -> str:
        """What must be equal on all ranks: names, shapes, dtypes, and samples of the values."""
        digest = hashlib.sha256()
        for name in sorted(self._files):
            dtype, shape, _ = self._stored(name)
            numel = math.prod(shape)
            digest.update(f"{name} {shape} {dtype}".encode())
            for start in (0, numel // 2, max(0, numel - _SAMPLE)):
                sample = self.read(name, start, min(numel, start + _SAMPLE))
                digest.update(bytes(sample.contiguous().view(torch.uint8).tolist()))
        return f"{len(self._files)} tensors with digest {digest.hexdigest()[:16]}"


def _file_in(path: Path) -> Path:
    """The file or index that `path` means."""
    if not path.is_dir():
        return path
    for pattern in (SINGLE, INDEX, "*.safetensors.index.json", "*.safetensors"):
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return found[0]
    raise ValueError(
        f"the folder {path} holds neither {SINGLE} nor {INDEX}, nor exactly one file of these "
        "kinds; name the file"
    )


def _contents(file: Path) -> Mapping[Path, list[str] | None]:
    """The files with their tensors; None for all tensors of a file."""
    if file.suffix != ".json":
        return {file: None}
    try:
        pairs = list(parse_json(read_regular(file, _INDEX_BYTES))["weight_map"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"cannot read {file} as an index of safetensors files ({type(error).__name__}: {error})"
        ) from error
    contents: dict[Path, list[str] | None] = {}
    for name, part in pairs:
        # Only the name: the cache of Hugging Face has symbolic links to files elsewhere.
        if not isinstance(part, str) or Path(part).is_absolute() or ".." in Path(part).parts:
            raise ValueError(f"{file} places {name!r} in {part!r}, which is no file in its folder")
        names = contents.setdefault(file.parent / part, [])
        assert names is not None
        names.append(name)
    return contents


def _expected(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by all their names in a state dict."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield canonical(start + name), tensor


def _unsaved_buffers(model: nn.Module) -> set[str]:
    return {
        canonical(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }

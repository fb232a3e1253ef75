"""New files get their names when they are complete, and belong to the program that makes them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from poplar.checkpoint import conversion
from poplar.checkpoint.files import data_file, new_files
from poplar.checkpoint.files.new_files import alone_in
from poplar.checkpoint.save import _make_folder
from poplar.checkpoint.saved_model import Writer


class Interrupts:
    """Ends the program while it is pickled."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_what_was_interrupted_leaves_no_file(tmp_path: Path) -> None:
    output = tmp_path / "all.pt"
    values = {"before": torch.ones(1 << 20), "other": Interrupts()}
    with (
        mock.patch.object(conversion, "OpenedCheckpoint"),
        mock.patch.object(conversion, "values_of", return_value=values),
    ):
        with pytest.raises(KeyboardInterrupt):
            conversion.convert(tmp_path, output, "torch")
        assert list(tmp_path.iterdir()) == []
        values["other"] = 3
        conversion.convert(tmp_path, output, "torch")
    assert torch.load(output)["other"] == 3
    assert list(tmp_path.iterdir()) == [output]


def make_file(folder: Path) -> Any:
    writer = Writer(folder / "model.safetensors", [("a", torch.ones(4))], {})
    if writer._error is not None:
        raise writer._error
    return writer


def make_folder(folder: Path) -> Any:
    return _make_folder(folder / "saved", replaces=False)


@pytest.mark.parametrize("make", [make_file, make_folder])
def test_of_two_programs_that_begin_at_once_one_raises(make: Any, tmp_path: Path) -> None:
    """The second one looks for writers when the first one has made its file, before its lock."""
    made: list[Any] = []
    errors: list[Exception] = []

    def second_program() -> None:
        try:
            made.append(make(tmp_path))
        except FileExistsError as error:
            errors.append(error)

    second, lock = threading.Thread(target=second_program), new_files.lock

    def lock_late(file: Any) -> None:
        if second.ident is None:
            second.start()
            second.join(0.5)
        lock(file)

    with (
        mock.patch.object(new_files, "lock", lock_late),
        mock.patch.object(data_file, "lock", lock_late),
    ):
        made.append(make(tmp_path))
        second.join()
    assert len(made) == len(errors) == 1
    assert "another save is writing" in str(errors[0])


def test_a_locked_folder_delays_a_save_only(tmp_path: Path, monkeypatch: Any) -> None:
    """As `flock FOLDER torchrun ...` locks it for the whole job."""
    monkeypatch.setattr(new_files, "_WAIT_SECONDS", 0.1)
    with alone_in(tmp_path):
        make_file(tmp_path).discard()

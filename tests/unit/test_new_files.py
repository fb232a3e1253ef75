"""New files get their names when they are complete, and belong to the program that makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from poplar.checkpoint import conversion
from poplar.checkpoint.save import _make_folder


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


def test_a_folder_is_in_use_from_the_moment_it_is_made(tmp_path: Path) -> None:
    file = _make_folder(tmp_path / "saved", replaces=False)
    with pytest.raises(FileExistsError, match="another save is writing"):
        _make_folder(tmp_path / "saved", replaces=False)
    file.close()
    _make_folder(tmp_path / "saved", replaces=False).close()

"""The program of the guide on Lightning trains, and goes on where it ended."""

from __future__ import annotations

import re

import pytest
from test_checkpoint_guide import ROOT, launch


@pytest.mark.slow
def test_program_trains_and_resumes(tmp_path):
    page = (ROOT / "docs/guides/lightning.md").read_text("utf-8")
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)[0])
    folder = str(tmp_path / "checkpoints")
    first = launch(script, 2, folder, "2", "2")
    assert "epoch 2: val_loss" in first
    second = launch(script, 1, folder, "1", "4", f"{folder}/last.ckpt")
    losses = [float(text.rpartition(" ")[2]) for text in (first, second)]
    assert losses[1] < losses[0]

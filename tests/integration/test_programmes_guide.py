"""The program of the guide on divided tensors trains, by a programme or by the plan."""

from __future__ import annotations

import re

import torch
from test_checkpoint_guide import ROOT, launch


def test_program_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("POPLAR_CACHE", str(tmp_path / "cache"))
    page = (ROOT / "docs/guides/programmes.md").read_text("utf-8")
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)[0])
    output = launch(script, 2, str(tmp_path / "checkpoint.pt"))
    losses = [float(found) for found in re.findall(r"step \d+: loss (\S+)", output)]
    assert len(losses) == 512 // 16
    assert losses[-1] < losses[0]
    state = torch.load(tmp_path / "checkpoint.pt")
    assert state["model"]["0.up"].shape == (8, 64, 512)
    assert state["optimizer"]["state"][0]["exp_avg"].shape == (8, 64, 512)

"""The program of the guide on unequal lengths plans, trains, and learns."""

from __future__ import annotations

import re

from test_checkpoint_guide import ROOT, launch


def test_program_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("POPLAR_CACHE", str(tmp_path / "cache"))
    page = (ROOT / "docs/guides/variable-lengths.md").read_text("utf-8")
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)[0])
    output = launch(script, 2, "2")
    losses = [float(found) for found in re.findall(r"epoch \d: loss (\S+)", output)]
    assert len(losses) == 3
    assert losses[-1] < 0.8 * losses[0]
    assert "padded to" not in output

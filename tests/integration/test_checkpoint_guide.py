"""The program of the guide on checkpoints goes on where it ended, on other numbers of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import torchrun

ROOT = Path(__file__).parents[2]


def launch(script: Path, ranks: int, *arguments: str) -> str:
    output = script.with_suffix(".txt")
    rendezvous = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    started = (*rendezvous, f"--nproc-per-node={ranks}", str(script), *arguments)
    agent = torchrun.start(started, output, {})
    agent.join(timeout=240)
    assert agent.exitcode == 0, output.read_text()
    return output.read_text()


def test_program_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/checkpoints.md").read_text("utf-8")
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)[0])
    assert "step 6: loss" in launch(script, 2, str(tmp_path / "moved"), "6")
    resumed = launch(script, 1, str(tmp_path / "moved"), "12")
    names = sorted(path.name for path in (tmp_path / "moved").iterdir())
    assert names == ["step-00000009", "step-00000012"]
    undisturbed = launch(script, 1, str(tmp_path / "undisturbed"), "12")
    losses = [float(re.findall(r"loss (\S+)", text)[0]) for text in (resumed, undisturbed)]
    assert abs(losses[0] - losses[1]) <= 1e-5 * losses[1]

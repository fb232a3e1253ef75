"""The scripts of the guide on DDP and FSDP2 plan and train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torchrun
from subset import choose

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/ddp-and-fsdp2.md").read_text("utf-8")
SCRIPT, SHARDED = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.M)


def replaced(script: str, pattern: str, text: str) -> str:
    """The script with the one match of a pattern replaced."""
    changed, found = re.subn(pattern, lambda _: text, script, flags=re.M)
    assert found == 1, pattern
    return changed


def sharded_script() -> str:
    """The script for FSDP2, as the page tells how to make it."""
    imports, plan = SHARDED.split("\nplan = ", 1)
    plan, wrapping = plan.split("for layer", 1)
    script = replaced(SCRIPT, r"^from torch.nn.parallel .*\n", "")
    script = replaced(script, r"^from poplar.integrations.ddp .*\n", imports)
    script = replaced(script, r"^plan = autotune.*\n", f"plan = {plan}")
    return replaced(script, r"^model = Distributed.*\n", f"for layer{wrapping}")


@pytest.mark.every_combination
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_script_plans_and_trains(tmp_path: Path, engine: str) -> None:
    """As it stands with `--full`; otherwise it may spend fewer seconds on measurements."""
    script = tmp_path / "train.py"
    budget = choose(quick="seconds=0.3,", full="seconds=10,")
    program = SCRIPT if engine == "ddp" else sharded_script()
    script.write_text(replaced(program, "seconds=10,", budget))
    variables = {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ran = torchrun.run([script], ranks=2, environment=variables, timeout=300)
    assert ran.returncode == 0, ran.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", ran.stdout, re.M)]
    assert len(losses) == 16
    assert losses[-1] < losses[0] / 2
    assert "stage 0 (replicated)" in ran.stdout or engine == "fsdp2"
    assert "mean over tokens" not in ran.stderr

"""The programs of the guides on Hugging Face's libraries run as they are."""

from __future__ import annotations

import re
from pathlib import Path

from readme import patched
from subset import choose
from test_checkpoint_guide import ROOT, launch

CHANGED_LINES = 5
"""That a script for `Trainer` needs; test_install.py runs the changed one."""


def program_of(guide: str, folder: Path) -> Path:
    page = (ROOT / "docs/guides" / guide).read_text("utf-8")
    script = folder / "train.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)[0])
    return script


def test_a_script_for_trainer_changes_in_five_lines() -> None:
    script, changed = patched("examples/plain_trainer.py", "docs/guides/transformers.md")
    assert changed <= CHANGED_LINES
    compile(script, "plain_trainer.py", "exec")


def test_program_with_trainer_plans_trains_and_resumes(tmp_path: Path) -> None:
    script = program_of("transformers.md", tmp_path)
    options = ["--output_dir", str(tmp_path / "run"), "--use_cpu", "--report_to", "none"]
    options += ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
    options += ["--disable_tqdm", "true", "--dataloader_num_workers", "1", "--no_cache"]
    first = launch(
        script,
        2,
        *options,
        "--max_steps",
        "4",
        "--save_steps",
        "4",
        *choose(quick=("--seconds", "0.5", "--stage", "2"), full=("--seconds", "2")),
        "--no_verify",
    )
    assert "step 4: evaluation loss" in first
    assert "samples" in first, "the plan"
    plan = ["--plan", "5,3", "--stage", "3"]
    checkpoint = ["--resume_from_checkpoint", str(tmp_path / "run/checkpoint-4")]
    resumed = launch(script, 2, *options, "--max_steps", "10", *plan, *checkpoint)
    losses = [float(text.rpartition(" ")[2]) for text in (first, resumed)]
    assert "step 10: evaluation loss" in resumed
    assert losses[1] < losses[0]


def test_program_with_accelerator_plans_and_trains(tmp_path: Path) -> None:
    script = program_of("accelerate.md", tmp_path)
    output = launch(script, 2, str(tmp_path / "run"), "2", "2")
    assert float(output.rpartition(" ")[2]) < 0.5
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["epoch-0", "epoch-1"]

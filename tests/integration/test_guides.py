"""The programs of the guides run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from readme import launch, patched, program_of
from subset import choose

CHANGED_LINES = 5
"""That a script for `Trainer` needs; test_install.py runs the changed one."""


def test_program_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    script = program_of("checkpoints.md", tmp_path)
    assert "step 6: loss" in launch(script, 2, str(tmp_path / "moved"), "6")
    resumed = launch(script, 1, str(tmp_path / "moved"), "12")
    names = sorted(path.name for path in (tmp_path / "moved").iterdir())
    assert names == ["step-00000009", "step-00000012"]
    undisturbed = launch(script, 1, str(tmp_path / "undisturbed"), "12")
    losses = [float(re.findall(r"loss (\S+)", text)[0]) for text in (resumed, undisturbed)]
    assert abs(losses[0] - losses[1]) <= 1e-5 * losses[1]


def test_program_on_unequal_lengths_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("POPLAR_CACHE", str(tmp_path / "cache"))
    output = launch(program_of("variable-lengths.md", tmp_path), 2, "2")
    losses = [float(found) for found in re.findall(r"epoch \d: loss (\S+)", output)]
    assert len(losses) == 3
    assert losses[-1] < 0.8 * losses[0]
    assert "padded to" not in output


def test_program_trains_by_a_programme_or_by_the_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("POPLAR_CACHE", str(tmp_path / "cache"))
    script = program_of("programmes.md", tmp_path)
    output = launch(script, 2, str(tmp_path / "checkpoint.pt"))
    losses = [float(found) for found in re.findall(r"step \d+: loss (\S+)", output)]
    assert len(losses) == 512 // 16
    assert losses[-1] < losses[0]
    state = torch.load(tmp_path / "checkpoint.pt")
    assert state["model"]["0.up"].shape == (8, 64, 512)
    assert state["optimizer"]["state"][0]["exp_avg"].shape == (8, 64, 512)


@pytest.mark.slow
def test_program_with_lightning_trains_and_resumes(tmp_path):
    script = program_of("lightning.md", tmp_path)
    folder = str(tmp_path / "checkpoints")
    first = launch(script, 2, folder, "2", "2")
    assert "epoch 2: val_loss" in first
    second = launch(script, 1, folder, "1", "4", f"{folder}/last.ckpt")
    losses = [float(text.rpartition(" ")[2]) for text in (first, second)]
    assert losses[1] < losses[0]


def test_a_script_for_trainer_changes_in_five_lines() -> None:
    script, changed = patched("examples/plain_trainer.py", "docs/guides/transformers.md")
    assert changed <= CHANGED_LINES
    compile(script, "plain_trainer.py", "exec")


def test_program_with_trainer_plans_trains_and_resumes(tmp_path: Path) -> None:
    script = program_of("transformers.md", tmp_path)
    options = ["--output_dir", str(tmp_path / "run"), "--use_cpu", "--report_to", "none"]
    options += ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
    options += ["--disable_tqdm", "true", "--dataloader_num_workers", "1"]
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
        "--no_cache",
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

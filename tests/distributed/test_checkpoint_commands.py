"""`poplar checkpoint inspect` and `convert`: what is written loads in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool
from safetensors.torch import load_file
from test_checkpoint_safety import TWO, flip_bits
from test_checkpoints import build, groups_of, train
from test_materialization import LanguageModel, values_of
from torch import Tensor
from typer.testing import CliRunner

import poplar
from poplar.cli.app import app


def save(folder: str) -> dict[str, Tensor]:
    model, optimizer = build(TWO, compute_dtype=torch.bfloat16)
    train(optimizer, 0, 1)
    manager = poplar.CheckpointManager(folder, optimizer, state={"note": "text"})
    manager.save(7)
    return values_of(model, optimizer)


@pytest.fixture(scope="module")
def saved(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of a model that computes in bf16, and the values with which it computes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    values = ranks.run(save, str(folder), ranks=2)[0]
    return folder / "step-00000007", values


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def test_inspect_shows_step_plan_tensors_and_checks(saved: tuple[Path, Any]) -> None:
    text = run("inspect", saved[0], "--tensors").output
    for part in ("step", "7", "stage 3 on 2 ranks", "AdamW", "note", "all as written", "exp_avg"):
        assert part in text
    document = json.loads(run("inspect", saved[0], "--json", "--no-verify").output)
    assert (document["step"], document["world_size"], document["verified"]) == (7, 2, False)
    assert document["tensors"]["model.head.weight"]["dtype"] == "float32"
    assert set(document["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp", "plan.json"}


def test_inspect_names_a_damaged_file(saved: tuple[Path, Any], tmp_path: Path) -> None:
    import random
    import shutil

    shutil.copytree(saved[0], tmp_path / "damaged")
    flip_bits(tmp_path / "damaged" / "__0_0.distcp", random.Random(0))
    result = run("inspect", tmp_path / "damaged")
    assert result.exit_code == 1
    assert "__0_0.distcp" in result.output


def test_converted_file_continues_in_plain_pytorch(saved: tuple[Path, Any], tmp_path: Path) -> None:
    assert run("convert", saved[0], tmp_path / "all.pt", "--to", "torch").exit_code == 0
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (loaded["step"], loaded["state"]) == (7, {"note": "text"})
    model = LanguageModel()
    model.load_state_dict({n: v.float() for n, v in loaded["model"].items()})
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.1)
    optimizer.load_state_dict(loaded["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    state = optimizer.state[model.embedding.weight]
    assert state["step"] == 1
    assert state["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize("dtype", ["model", "stored"])
def test_safetensors_have_the_values_and_tied_ones_once(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, dtype: str
) -> None:
    folder, values = saved
    options = ("--to", "safetensors", "--dtype", dtype)
    assert run("convert", folder, tmp_path / "one.safetensors", *options).exit_code == 0
    found = load_file(tmp_path / "one.safetensors")
    assert found.keys() == values.keys() - {"head.weight"}
    for name, value in found.items():
        expected = values[name]
        trained = name != "blocks.0.norm1.weight" and expected.is_floating_point()
        assert (value.dtype == expected.dtype) == (dtype == "model" or not trained), name
        torch.testing.assert_close(value.to(expected.dtype), expected, rtol=0, atol=0)
    again = run("convert", folder, tmp_path / "one.safetensors", *options)
    assert again.exit_code == 1
    assert "exists" in again.output

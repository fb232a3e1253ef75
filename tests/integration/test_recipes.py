"""The scripts and settings of recipes/ train tiny models on two unequal CPU ranks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import util
from pathlib import Path

import numpy as np
import peft  # noqa: F401  (the programs are forks of this process)
import pytest
import torch
import torchrun
import trl  # noqa: F401
import yaml
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

RECIPES = Path(__file__).parents[2] / "recipes"
CHANGED_LINES = {
    "axolotl": 5,
    "diffusers-lora": 5,
    "llama-factory": 5,
    "muon": 7,  # two are the param groups
    "trl-qlora": 5,
}
"""By recipe, the most lines that the same program without Poplar has not."""
SHORT_TUNING = "tuning={'seconds': 1, 'verify': False, 'cache': False}"
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
TRAINING = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "use_cpu": True,
    "report_to": "none",
}


def save_language_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    return folder


def save_lines(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sentences(count: int = 24) -> list[str]:
    """Texts of unequal lengths."""
    return [" ".join(WORDS[4 + (n + k) % 26] for k in range(6 + n % 9)) for n in range(count)]


def launch(*command: object, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    done = torchrun.run(command, ranks=2, folder=folder, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"(?:'loss': '|: loss )([\d.]+)", printed)]


def options(values: dict[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def with_argument(script: Path, folder: Path, after: str, added: str) -> Path:
    """A copy of a script with another argument in a call, so that it measures for a second."""
    text = script.read_text("utf-8")
    assert text.count(after) == 1
    copy = folder / "train.py"
    copy.write_text(text.replace(after, f"{after}, {added}"), "utf-8")
    return copy


def test_trl_trains_adapters_on_a_quantised_model(tmp_path: Path) -> None:
    model = save_language_model(tmp_path / "model")
    data = save_lines(tmp_path / "data.jsonl", [{"text": text} for text in sentences()])
    given = TRAINING | {"model": model, "data": data, "output_dir": tmp_path / "run"}
    printed = launch(
        RECIPES / "trl-qlora/train.py",
        *options(given | {"plan": "3,1", "stage": 2, "max_length": 32}),
        folder=tmp_path,
    )
    first, *_, last = losses(printed)
    assert last < first
    saved = load_file(tmp_path / "run/adapter_model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)


def save_diffusion_model(folder: Path) -> Path:
    torch.manual_seed(0)
    small = {"norm_num_groups": 2, "layers_per_block": 1}
    UNet2DConditionModel(
        block_out_channels=(4, 8),
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        **small,
    ).save_pretrained(folder / "unet")
    AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        **small,
    ).save_pretrained(folder / "vae")
    DDPMScheduler().save_pretrained(folder / "scheduler")
    words = ["<|startoftext|>", "<|endoftext|>", *WORDS[4:], *(f"{w}</w>" for w in WORDS[4:])]
    tokenizer = CLIPTokenizer(vocab={w: n for n, w in enumerate(words)}, merges=[])
    tokenizer.model_max_length = 8
    tokenizer.save_pretrained(folder / "tokenizer")
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=0,
        eos_token_id=1,
    )
    CLIPTextModel(config).save_pretrained(folder / "text_encoder")
    return folder


@pytest.mark.full  # importing diffusers takes longer than training
def test_accelerate_trains_adapters_of_a_diffusion_model(tmp_path: Path) -> None:
    model = save_diffusion_model(tmp_path / "model")
    images = tmp_path / "images"
    images.mkdir()
    for number in range(8):
        pixels = np.full((16, 16, 3), 30 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "text": "a b c"} for number in range(8)]
    save_lines(images / "metadata.jsonl", rows)
    script = with_argument(
        RECIPES / "diffusers-lora/train.py", tmp_path, "loss_fn=loss_fn", SHORT_TUNING
    )
    given = {"model": model, "images": images, "output": tmp_path / "run"}
    small = {"resolution": 16, "batch": 2, "epochs": 2}
    printed = launch(script, *options(given | small), folder=tmp_path)
    assert len(losses(printed)) == 2
    saved = load_file(tmp_path / "run/pytorch_lora_weights.safetensors")
    assert any(value.any() for name, value in saved.items() if "lora_B" in name), "none is trained"


def test_plain_loop_trains_with_muon(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 200)
    script = with_argument(
        RECIPES / "muon/train.py", tmp_path, "stage=2", "seconds=1, verify=False, cache=False"
    )
    small = {"text": text, "context": 32, "hidden": 64, "layers": 1, "global-batch": 8}
    printed = launch(script, *options(small), folder=tmp_path)
    first, last = losses(printed)
    assert last < first


def needs(package: str, version: str) -> pytest.MarkDecorator:
    """CI does not install these: they ask for other versions of transformers."""
    return pytest.mark.skipif(
        util.find_spec(package) is None,
        reason=f"needs {package} {version}; the README of the recipe says how to install it",
    )


def instructions() -> list[dict[str, str]]:
    return [{"instruction": text, "input": "", "output": text[::-1]} for text in sentences()]


@needs("llamafactory", "0.9.5")
def test_llama_factory_trains_adapters_on_a_quantised_model(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/instructions.json").write_text(json.dumps(instructions()))
    described = {"instructions": {"file_name": "instructions.json"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(described))
    settings = yaml.safe_load((RECIPES / "llama-factory/llama3_qlora.yaml").read_text("utf-8"))
    model = save_language_model(tmp_path / "model")
    settings |= TRAINING | {"model_name_or_path": str(model), "template": "default", "bf16": False}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    printed = launch(
        RECIPES / "llama-factory/train.py",
        "tiny.yaml",
        folder=tmp_path,
        environment={"DISABLE_VERSION_CHECK": "1"},
    )
    first, *_, last = losses(printed)
    assert last < first
    assert (tmp_path / "run/adapter_model.safetensors").exists()


ON_CPU = """
from poplar_plugin import PoplarPlugin

class CpuPlugin(PoplarPlugin):
    def pre_model_load(self, cfg):
        cfg.device_map = {"": "cpu"}  # axolotl: the GPU of each of several ranks

    def get_training_args(self, cfg):
        return super().get_training_args(cfg) | {"use_cpu": True}
"""


@needs("axolotl", "0.19")
def test_axolotl_trains_adapters_on_a_quantised_model(tmp_path: Path) -> None:
    save_lines(tmp_path / "instructions.jsonl", instructions())
    (tmp_path / "cpu_plugin.py").write_text(ON_CPU)
    shutil.copy(RECIPES / "axolotl/poplar_plugin.py", tmp_path)
    settings = yaml.safe_load((RECIPES / "axolotl/llama3_qlora.yaml").read_text("utf-8"))
    settings |= {
        "base_model": str(save_language_model(tmp_path / "model")),
        "plugins": ["cpu_plugin.CpuPlugin"],
        "special_tokens": {"pad_token": "<pad>"},
        "bf16": False,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler": "constant",
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    variables = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    program = ("-m", "axolotl.cli.train")
    printed = launch(*program, "tiny.yaml", folder=tmp_path, environment=variables)
    first, *_, last = losses(printed)
    assert last < first
    assert (tmp_path / "run/adapter_model.safetensors").exists()


@pytest.mark.parametrize("recipe", CHANGED_LINES)
def test_page_of_a_recipe_has_its_changed_lines_and_its_table(recipe: str) -> None:
    folder = RECIPES / recipe
    page = (folder / "README.md").read_text("utf-8")
    programs = [path.read_text("utf-8") for path in folder.iterdir() if path.suffix != ".md"]
    lines = {line.strip() for text in programs for line in text.splitlines()}
    (diff,) = re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.M)
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    assert not set(added) - lines
    assert len(added) <= CHANGED_LINES[recipe]
    command = [sys.executable, RECIPES / "memory.py", recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout in page

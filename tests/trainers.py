"""Models, data and settings for tests of Hugging Face's trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from launched import BATCH
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

WORDS = 50


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    small = {"vocab_size": WORDS, "max_position_embeddings": 32}
    if name == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes, **small))
    if name in ("bert", "tagger"):
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        options |= {"num_attention_heads": 2, "num_labels": WORDS}
        cls = BertForMaskedLM if name == "bert" else BertForTokenClassification
        return cls(BertConfig(**options, **sizes, **small))
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=WORDS, n_positions=32, **dropouts)
    )


class Sentences(Dataset[dict[str, list[int]]]):
    """Sequences of unequal lengths; some samples have few labels, and one has none."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.samples = []
        for number in range(count):
            length = int(torch.randint(4, 17, (1,), generator=generator))
            words = torch.randint(3, WORDS, (length,), generator=generator).tolist()
            hidden = torch.rand(length, generator=generator).tolist()
            labels = [w if h < 0.4 and number else -100 for w, h in zip(words, hidden, strict=True)]
            self.samples.append({"input_ids": words, "labels": labels})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> dict[str, list[int]]:
        return self.samples[at]


def padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def rows(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([s[name] + [fill] * (longest - len(s[name])) for s in samples])

    ones = [{"mask": [1] * len(s["input_ids"])} for s in samples]
    mask = torch.tensor([o["mask"] + [0] * (longest - len(o["mask"])) for o in ones])
    return {
        "input_ids": rows("input_ids", 0),
        "labels": rows("labels", -100),
        "attention_mask": mask,
    }


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**(options | changes))


def logged(trainer: Trainer) -> list[tuple[float, float, float]]:
    return [
        (entry["loss"], entry["grad_norm"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "grad_norm" in entry
    ]

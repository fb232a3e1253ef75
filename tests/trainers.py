"""Data and settings for tests of Hugging Face's trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from language_models import WORDS
from launched import BATCH
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


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

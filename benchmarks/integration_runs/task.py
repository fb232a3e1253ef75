"""The training task: a Hugging Face model from its config, on sequences of one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

MODELS = ("llama", "bert", "gpt2")
SIZES = {"tiny": (32, 2), "demo": (192, 4)}
"""Width and layers."""
WORDS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A small picklable value from which every rank builds its model and data."""

    model: str = "llama"
    size: str = "demo"
    context: int = 64
    samples: int = 48
    """The global batch."""

    def new_model(self) -> nn.Module:
        """The same weights at every call, on every rank; without dropout."""
        import transformers

        width, layers = SIZES[self.size]
        torch.manual_seed(0)
        if self.model == "gpt2":
            dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": self.context}
            config = transformers.GPT2Config(vocab_size=WORDS, **sizes, **dropouts)
            return transformers.GPT2LMHeadModel(config)
        sizes = {
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "max_position_embeddings": self.context,
            "vocab_size": WORDS,
        }
        if self.model == "bert":
            dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **dropouts))
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))

    def data(self) -> Dataset[dict[str, Tensor]]:
        """The dataset, the same on every rank."""
        return Sequences(self)

    def blocks(self, model: Any) -> list[nn.Module]:
        """The transformer's blocks, which sharding engines use as units."""
        if self.model == "gpt2":
            return list(model.transformer.h)
        return list(model.bert.encoder.layer if self.model == "bert" else model.model.layers)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, a mean over tokens."""
    loss: Tensor = model(**batch).loss
    return loss


class Sequences(Dataset[dict[str, Tensor]]):
    """Random words; every one is a label, so that a mean over samples is one over tokens."""

    def __init__(self, task: Task) -> None:
        generator = torch.Generator().manual_seed(0)
        self._words = torch.randint(0, WORDS, (2048, task.context), generator=generator)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"input_ids": self._words[at], "labels": self._words[at]}

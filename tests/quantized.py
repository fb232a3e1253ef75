"""A small Llama on a quantised base, with adapters, and how one process trains it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import peft
import torch
from subset import choose
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

WORDS, LENGTH, BATCH = 50, 8, 12
STEPS = choose(quick=6, full=20)
OPTIONS = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.0}
BASES = {
    "4-bit": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
    "int8": TorchAoConfig(Int8WeightOnlyConfig()),
}


def base_of(kind: str) -> LlamaForCausalLM:
    """The Llama without adapters, quantised as `from_pretrained` does it."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    state, quantized = LlamaForCausalLM(config).state_dict(), BASES[kind]
    return LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=state, quantization_config=quantized, dtype=torch.float32
    )


def adapted(kind: str) -> nn.Module:
    """With LoRA, gradient checkpointing and frozen values as users of QLoRA have them."""
    recomputing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    base = peft.prepare_model_for_kbit_training(base_of(kind), **recomputing)
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}
    return peft.get_peft_model(base, peft.LoraConfig(r=4, **options)).train()


def samples() -> list[dict[str, list[int]]]:
    """As many as the steps need, all of one length, so that means over samples are exact."""
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(3, WORDS, (STEPS * BATCH, LENGTH), generator=generator).tolist()
    return [{"input_ids": own, "labels": own} for own in words]


def collated(several: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor([one[name] for one in several]) for name in ("input_ids", "labels")}


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def trained_values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the adapters; their values must be on this rank."""
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


@functools.cache
def one_process(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the adapters after the last step."""
    model, losses, data = adapted(kind), [], samples()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model, collated(data[step * BATCH : (step + 1) * BATCH]))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, trained_values(model)

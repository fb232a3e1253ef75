"""Random programmes of Hugging Face's models: loss and gradients are those of the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from virtual_programme import leaf_values, loss_and_gradients, of_one_process, random_programme

from poplar.programmes.graph.placement import Sharded
from poplar.programmes.rules.registry import strategies_of, without_rules
from poplar.programmes.run.checked_export import CheckedExport
from poplar.programmes.run.exported_graph import ExportedLoss

transformers = pytest.importorskip("transformers")

SAMPLES, TOKENS, VOCABULARY = 3, 6, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 4,
}


def decoder(kind: str, **more: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **more})
    return transformers.AutoModelForCausalLM.from_config(config)


def mixtral(experts: str) -> nn.Module:
    model = decoder("mixtral", num_local_experts=4)
    model.set_experts_implementation(experts)
    return model


def modernbert() -> nn.Module:
    config = transformers.ModernBertConfig(**SIZES, cls_token_id=1, sep_token_id=2)
    return transformers.ModernBertForMaskedLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: decoder("llama"),
    "mixtral, grouped": lambda: mixtral("grouped_mm"),
    "mixtral, batched": lambda: mixtral("batched_mm"),
    "modernbert": modernbert,
    "qwen3": lambda: decoder("qwen3", head_dim=4),
    "gemma2": lambda: decoder("gemma2", head_dim=4),
    "phi": lambda: decoder("phi"),
    "deepseek_v3": lambda: decoder("deepseek_v3", **DEEPSEEK),
    "gpt2": lambda: decoder("gpt2", **GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **T5)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**{**SIZES, **WITHOUT_DROPOUT})
    ),
}
QUICK = ("llama", "mixtral, grouped", "modernbert")
BATCHED = pytest.param("mixtral, batched", marks=pytest.mark.full)
FULL = [pytest.param(name, marks=pytest.mark.full) for name in MODELS if name not in QUICK]


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the tokens of the global batch."""
    loss: Tensor = model(input_ids=batch["tokens"], labels=batch["labels"]).loss
    return loss


@cache
def exported(name: str) -> tuple[nn.Module, dict[str, Tensor], ExportedLoss]:
    torch.manual_seed(0)
    model = MODELS[name]()
    tokens = torch.randint(3, VOCABULARY, (2, SAMPLES, TOKENS))
    batch = {"tokens": tokens[0], "labels": tokens[1]}
    return model, batch, CheckedExport(model, loss_of, batch, SAMPLES).exported


@pytest.mark.parametrize("name", [*QUICK, *FULL])
def test_random_programmes_compute_the_loss_and_its_gradients(name: str) -> None:
    model, batch, found = exported(name)
    leaves = leaf_values(found, model, batch)
    expected, wanted = of_one_process(model, loss_of, batch)
    draws = random.Random(name)
    for ratios in ((2, 1), (1, 0, 2)):
        programme = random_programme(found.graph, ratios, draws)
        loss, gradients = loss_and_gradients(found.graph, programme, leaves)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral, grouped", BATCHED])
def test_experts_of_mixtral_can_be_divided(name: str) -> None:
    graph = exported(name)[2].graph
    experts = [node for source, node in graph.parameters.items() if ".experts." in source]
    assert len(experts) == 2
    for parameter in experts:
        (reader,) = (node for node in graph.nodes.values() if parameter.name in node.inputs)
        at = reader.inputs.index(parameter.name)
        assert any(s.inputs[at] == Sharded(0) for s in strategies_of(graph, reader))


@pytest.mark.parametrize("name", [*QUICK, *FULL])
def test_operators_on_tensors_have_rules(name: str) -> None:
    *_, found = exported(name)
    assert not [node.operator for node in without_rules(found.graph) if node.inputs]

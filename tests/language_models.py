"""Small language models of transformers, without dropout."""

from __future__ import annotations

import torch
from torch import nn

WORDS = 50
"""Size of the vocabulary."""


def model_of(name: str) -> nn.Module:
    """`name`: "llama", "gpt2", "bert", or "tagger": a BERT that labels each token."""
    import transformers  # slow, and not all tests that import this module need it

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "n_positions": 32}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 32}
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **dropouts, num_labels=WORDS)
    if name == "bert":
        return transformers.BertForMaskedLM(config)
    return transformers.BertForTokenClassification(config)

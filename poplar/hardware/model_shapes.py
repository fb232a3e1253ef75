"""Transformer shapes by name: parameters, FLOPs and activation memory, by formula.

An `Architecture` gives the parameters of each unit. A `TrainingJob` adds the sequence length and
activation checkpointing, and gives the FLOPs and the activation memory of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HALF_BYTES = 2
_LOGIT_BYTES = 10
"""Per logit at the peak: 4 in fp32 for the loss, and the gradient in fp32 and 16 bit.
Korthikanti et al. count only the 4; PyTorch's cross entropy also holds the gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The shape of one transformer with its language modelling head."""

    name: str
    hidden: int
    layers: int
    heads: int
    mlp: int
    """Inner width of the MLP."""
    vocabulary: int
    sequence: int
    """Default tokens per sample."""
    gated: bool = False
    """Whether the MLP has a gate, so three matrices (Llama)."""
    masked: bool = False
    """Whether the model predicts masked tokens (BERT): its embeddings have a norm, and its head a
    dense layer and a bias per token."""
    key_value_heads: int = 0
    """Heads of keys in grouped-query attention; 0: as many as `heads`."""
    positions: int = 0
    """Rows of learned position embeddings."""
    token_types: int = 0
    """Rows of segment embeddings (BERT)."""
    tied: bool = True
    """Whether the head shares the token embedding."""
    attention_biases: int = 4
    """How many of the four attention projections have a bias."""
    biases: bool = True
    """Whether MLP and norms have biases."""
    final_norm: bool = True
    dropout: bool = True
    embedding_width: int = 0
    """Width of the token embedding if it is projected to `hidden` (OPT-350M); 0: `hidden`."""

    @property
    def units(self) -> dict[str, int]:
        """Parameters of each unit: embeddings, every block, head. Module names are not known."""
        hidden, projection = self.hidden, self.embedding_width * self.hidden
        norm = hidden * (1 + self.biases)
        keys = hidden * (self.key_value_heads or self.heads) // self.heads
        attention = 2 * hidden * (hidden + keys) + self.attention_biases * hidden
        mlp = (2 + self.gated) * hidden * self.mlp + (self.mlp + hidden) * self.biases
        block = attention + mlp + 2 * norm
        embedding = self._tokens + self._positions + projection + norm * self.masked
        head = projection + norm * self.final_norm + (0 if self.tied else self._tokens)
        if self.masked:
            head += hidden * (hidden + 1) + self.vocabulary
        blocks = {f"block {layer}": block for layer in range(self.layers)}
        return {"embedding": embedding, **blocks, "head": head}

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(self.units.values())

    @property
    def multiplied_numel(self) -> int:
        """Parameters that take part in matrix products: all but lookup tables."""
        return self.numel - self._positions - (0 if self.tied else self._tokens)

    @property
    def _tokens(self) -> int:
        return self.vocabulary * (self.embedding_width or self.hidden)

    @property
    def _positions(self) -> int:
        return (self.positions + self.token_types) * self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A model and how it is trained: 16-bit parameters and activations, fp32 masters, AdamW."""

    architecture: Architecture
    sequence: int = 0
    """Tokens per sample; 0: the architecture's default."""
    checkpointing: bool = False
    """Whether the backward recomputes each block from its input."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequence", self.sequence or self.architecture.sequence)
        if 0 < self.architecture.positions < self.sequence:
            raise ValueError(
                f"{self.architecture.name} has positions for {self.architecture.positions} tokens, "
                f"got a sequence of {self.sequence}; use a shorter sequence, or a model without "
                "learned positions"
            )

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward: `6 * parameters * s + 12 * L * h * s^2`.

        Model FLOPs as MFU defines them (PaLM, appendix B): three times the forward, full attention
        even if causal, no recomputation.
        """
        shape, s = self.architecture, self.sequence
        attention = 12 * shape.layers * shape.hidden * s * s
        return float(6 * shape.multiplied_numel * s + attention)

    @property
    def recomputation(self) -> float:
        """Factor of a pass's time for the second forward of checkpointing."""
        return 4 / 3 if self.checkpointing else 1.0

    @property
    def layer_bytes_per_sample(self) -> float:
        """Bytes that the forward of one block stores for its backward.

        Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
        section 4.1: `34 s h` in 16 bit, without the scores, which fused attention does not store.
        The terms below also cover grouped-query attention, other MLPs and models without dropout.
        With `k` the key-value heads over the heads and `f` the MLP's width over `h`:

            attention  input 2, queries 2, keys and values 4 k, input of its output projection 2
            MLP        input 2 and 4 f (its nonlinearity's input and output), gated 8 f
            norms      4
            dropout    2 (two masks)

        The sum is 34 for GPT (`k = 1`, `f = 4`). The blocks of the transformers library store more,
        counted on a CPU: BERT 6 %, Llama 23 % (norms in fp32), GPT-2 88 % (GELU in small
        operations).
        """
        shape = self.architecture
        keys = (shape.key_value_heads or shape.heads) / shape.heads
        mlp = shape.mlp / shape.hidden
        per_element = 12 + 4 * keys + (8 if shape.gated else 4) * mlp + 2 * shape.dropout
        return self.sequence * shape.hidden * per_element

    @property
    def produced_bytes_per_sample(self) -> float:
        """Bytes that the forward writes for the backward, stored or recomputed."""
        return self.layer_bytes_per_sample * self.architecture.layers + self._logit_bytes

    @property
    def activation_bytes_per_sample(self) -> float:
        """Peak bytes of a pass per sample.

        With checkpointing: `2 s h` per block (its input; Korthikanti et al., table 2), and one
        whole block or the logits.
        """
        if not self.checkpointing:
            return self.produced_bytes_per_sample
        shape = self.architecture
        inputs = HALF_BYTES * self.sequence * shape.hidden * shape.layers
        return inputs + max(self.layer_bytes_per_sample, self._logit_bytes)

    @property
    def _logit_bytes(self) -> float:
        """Logits and their gradient at the start of the backward."""
        return _LOGIT_BYTES * float(self.sequence * self.architecture.vocabulary)


def llama(
    name: str, hidden: int, layers: int, heads: int, mlp: int, **changes: Any
) -> Architecture:
    """A Llama of the second generation, but for the changes."""
    return _shape(name, hidden, layers, heads, _LLAMA, mlp=mlp, **changes)


def _shape(
    name: str, hidden: int, layers: int, heads: int, family: Mapping[str, Any], **changes: Any
) -> Architecture:
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "mlp": 4 * hidden}
    return Architecture(name=name, **{**sizes, **family, **changes})


_NO_BIASES = {"attention_biases": 0, "biases": False, "dropout": False, "sequence": 2048}
_LLAMA = {"gated": True, "vocabulary": 32000, "tied": False, **_NO_BIASES}
_LLAMA_3 = {**_LLAMA, "vocabulary": 128256, "sequence": 8192}
_MPT = {"vocabulary": 50368, **_NO_BIASES}
_GPT2 = {"vocabulary": 50257, "sequence": 1024, "positions": 1024}
_BERT = {"masked": True, "vocabulary": 30522, "sequence": 512, "positions": 512, "token_types": 2}
_GPT_NEO = {**_GPT2, "sequence": 2048, "positions": 2048, "attention_biases": 1}
# Of OPT's positions, two come before the first token.
_OPT = {"vocabulary": 50272, "sequence": 2048, "positions": 2050, "final_norm": False}

ARCHITECTURES = {
    known.name: known
    for known in (
        # Our own shape: the Poplar paper does not describe its 0.5B model.
        llama("llama-0.5b", 1280, 22, 20, 3456),
        llama("llama-1.1b", 2048, 22, 32, 5632, key_value_heads=4),  # TinyLlama
        llama("llama-7b", 4096, 32, 32, 11008),
        llama("llama-13b", 5120, 40, 40, 13824),
        _shape("llama-3-8b", 4096, 32, 32, _LLAMA_3, mlp=14336, key_value_heads=8),
        _shape("gpt2-124m", 768, 12, 12, _GPT2),
        _shape("gpt2-355m", 1024, 24, 16, _GPT2),
        _shape("gpt2-774m", 1280, 36, 20, _GPT2),
        _shape("gpt2-1.5b", 1600, 48, 25, _GPT2),
        _shape("gpt-neo-2.7b", 2560, 32, 20, _GPT_NEO),
        _shape("opt-350m", 1024, 24, 16, _OPT, embedding_width=512),
        _shape("mpt-125m", 768, 12, 12, _MPT),
        _shape("mpt-760m", 1536, 24, 12, _MPT),
        _shape("mpt-1b", 2048, 24, 16, _MPT),
        _shape("mpt-7b", 4096, 32, 32, _MPT, vocabulary=50432),
        _shape("bert-base", 768, 12, 12, _BERT),
        _shape("bert-large", 1024, 24, 16, _BERT),
    )
}


def architecture(name: str) -> Architecture:
    """The model with this name, in any case.

    Raises:
        ValueError: no such model; the message lists all names.
    """
    known = ARCHITECTURES.get(name.strip().lower())
    if known is None:
        raise ValueError(f"unknown model {name!r}; use one of {', '.join(ARCHITECTURES)}")
    return known

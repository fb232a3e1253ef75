"""Transformer shapes by name: parameters, FLOPs and activation memory, by formula.

An `Architecture` gives the parameters of each unit. A `TrainingJob` adds the sequence length and
activation checkpointing, and gives the FLOPs and the activation memory of a pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from poplar.schema import Count, PositiveCount, Rule, check_fields

HALF_BYTES = 2
_LOGIT_BYTES = 10
"""Per logit at the peak: 4 in fp32 for the loss, and the gradient in fp32 and 16 bit.
Korthikanti et al. count only the 4; PyTorch's cross entropy also holds the gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The shape of one transformer with its language modelling head."""

    name: str
    family: Annotated[str, Rule("llama, gpt or bert", ("llama", "gpt", "bert").__contains__)]
    """llama: RMS norms and a gated MLP of three matrices; gpt and bert: layer norms and an MLP of
    two matrices."""
    hidden: PositiveCount
    layers: PositiveCount
    heads: PositiveCount
    mlp: PositiveCount
    """Inner width of the MLP."""
    vocabulary: PositiveCount
    sequence: PositiveCount
    """Default tokens per sample."""
    key_value_heads: int = 0
    """For grouped-query attention; 0: as many as `heads`."""
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

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        freeze(self, "key_value_heads", self.key_value_heads or self.heads)
        freeze(self, "embedding_width", self.embedding_width or self.hidden)
        check_fields(self)
        if self.hidden % self.heads or self.heads % self.key_value_heads:
            raise ValueError(
                f"{self.name}: {self.heads} heads must divide {self.hidden} and be a multiple of "
                f"{self.key_value_heads} key-value heads"
            )

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, so three matrices."""
        return self.family == "llama"

    @property
    def embedding_numel(self) -> int:
        """Parameters before the first block."""
        rows = self.positions + self.token_types
        tables = self.vocabulary * self.embedding_width + rows * self.hidden
        norm = self._norm_numel if self.family == "bert" else 0
        return tables + norm + self._projection_numel

    @property
    def block_numel(self) -> int:
        """Parameters of one block: attention, MLP and two norms."""
        biases = (self.mlp + self.hidden) * self.biases + self.attention_biases * self.hidden
        return self._block_matrices + biases + 2 * self._norm_numel

    @property
    def head_numel(self) -> int:
        """Parameters after the last block, without a shared embedding."""
        own = 0 if self.tied else self.vocabulary * self.embedding_width
        if self.family == "bert":  # masked language modelling: dense, norm, a bias per token
            own += self.hidden * (self.hidden + 1) + self.vocabulary
        return own + self._projection_numel + self._norm_numel * self.final_norm

    @property
    def unit_numels(self) -> tuple[int, ...]:
        """Parameters of each unit: embeddings, every block, head."""
        return tuple(numel for _, numel in self._units if numel)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Generic unit names; the module names of the model are not known."""
        return tuple(name for name, numel in self._units if numel)

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(self.unit_numels)

    @property
    def multiplied_numel(self) -> int:
        """Parameters that take part in matrix products: all but lookup tables."""
        tables = (self.positions + self.token_types) * self.hidden
        if not self.tied:
            tables += self.vocabulary * self.embedding_width
        return self.numel - tables

    @property
    def _units(self) -> tuple[tuple[str, int], ...]:
        blocks = ((f"block {layer}", self.block_numel) for layer in range(self.layers))
        return ("embedding", self.embedding_numel), *blocks, ("head", self.head_numel)

    @property
    def _norm_numel(self) -> int:
        return self.hidden * (2 if self.biases and not self.gated else 1)

    @property
    def _projection_numel(self) -> int:
        return 0 if self.embedding_width == self.hidden else self.embedding_width * self.hidden

    @property
    def _block_matrices(self) -> int:
        keys = self.hidden * self.key_value_heads // self.heads
        attention = 2 * self.hidden * (self.hidden + keys)
        return attention + (3 if self.gated else 2) * self.hidden * self.mlp


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A model and how it is trained: 16-bit parameters and activations, fp32 masters, AdamW."""

    architecture: Architecture
    sequence: Count = 0
    """Tokens per sample; 0: the architecture's default."""
    checkpointing: bool = False
    """Whether the backward recomputes each block from its input."""
    fused_attention: bool = True
    """Attention that does not store its scores (FlashAttention, memory-efficient attention)."""

    def __post_init__(self) -> None:
        check_fields(self)
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
        section 4.1: `s h (34 + 5 a s / h)` in 16 bit; the second term is the scores, which fused
        attention does not store. The terms below also cover grouped-query attention, other MLPs and
        models without dropout. With `k` the key-value heads over the heads and `f` the MLP's width
        over `h`:

            attention  input 2, queries 2, keys and values 4 k, input of its output projection 2
            MLP        input 2 and 4 f (its nonlinearity's input and output), gated 8 f
            norms      4
            dropout    2 (two masks)

        The sum is 34 for GPT (`k = 1`, `f = 4`). The blocks of the transformers library store more,
        counted on a CPU: BERT 6 %, Llama 23 % (norms in fp32), GPT-2 88 % (GELU in small
        operations).
        """
        shape, s = self.architecture, self.sequence
        keys = shape.key_value_heads / shape.heads
        mlp = shape.mlp / shape.hidden
        per_element = 12 + 4 * keys + (8 if shape.gated else 4) * mlp + 2 * shape.dropout
        scores = 0 if self.fused_attention else (5 if shape.dropout else 2) * shape.heads * s * s
        return s * shape.hidden * per_element + scores

    @property
    def head_bytes_per_sample(self) -> float:
        """Logits and their gradient at the start of the backward."""
        return _LOGIT_BYTES * float(self.sequence * self.architecture.vocabulary)

    @property
    def activation_bytes_per_sample(self) -> float:
        """Peak bytes of a pass per sample.

        With checkpointing: `2 s h` per block (its input; Korthikanti et al., table 2), and one
        whole block or the logits.
        """
        shape, layer = self.architecture, self.layer_bytes_per_sample
        if self.checkpointing:
            inputs = HALF_BYTES * self.sequence * shape.hidden * shape.layers
            return inputs + max(layer, self.head_bytes_per_sample)
        return layer * shape.layers + self.head_bytes_per_sample

    @property
    def produced_bytes_per_sample(self) -> float:
        """Bytes that the forward writes for the backward, stored or recomputed."""
        whole = dataclasses.replace(self, checkpointing=False)
        return whole.activation_bytes_per_sample


def _shape(
    name: str, hidden: int, layers: int, heads: int, family: Mapping[str, Any], **changes: Any
) -> Architecture:
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "mlp": 4 * hidden}
    return Architecture(name=name, **{**sizes, **family, **changes})


_NO_BIASES = {"attention_biases": 0, "biases": False, "dropout": False, "sequence": 2048}
_LLAMA = {"family": "llama", "vocabulary": 32000, "tied": False, **_NO_BIASES}
_MPT = {"family": "gpt", "vocabulary": 50368, **_NO_BIASES}
_GPT2 = {"family": "gpt", "vocabulary": 50257, "sequence": 1024, "positions": 1024}
_BERT = {
    "family": "bert",
    "vocabulary": 30522,
    "sequence": 512,
    "positions": 512,
    "token_types": 2,
}
_GPT_NEO = {**_GPT2, "sequence": 2048, "positions": 2048, "attention_biases": 1}
_OPT = {  # two positions come before the first token
    "family": "gpt",
    "vocabulary": 50272,
    "sequence": 2048,
    "positions": 2050,
    "final_norm": False,
}

ARCHITECTURES = {
    known.name: known
    for known in (
        # Our own shape: the Poplar paper does not describe its 0.5B model.
        _shape("llama-0.5b", 1280, 22, 20, _LLAMA, mlp=3456),
        _shape("llama-1.1b", 2048, 22, 32, _LLAMA, mlp=5632, key_value_heads=4),  # TinyLlama
        _shape("llama-7b", 4096, 32, 32, _LLAMA, mlp=11008),
        _shape("llama-13b", 5120, 40, 40, _LLAMA, mlp=13824),
        _shape(
            "llama-3-8b",
            *(4096, 32, 32),
            _LLAMA,
            mlp=14336,
            vocabulary=128256,
            key_value_heads=8,
            sequence=8192,
        ),
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

"""Model shapes by name: what a transformer of known shape weighs, computes and keeps.

For planning on devices that nobody has: from a frozen `Architecture` follow its parameters by unit,
the FLOPs of a pass and the bytes that a pass keeps, all of them formulas. `TrainingJob` fixes the
two things beside the shape that these hang on: tokens of a sample, and activation checkpointing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

FAMILIES = ("llama", "gpt", "bert")
HALF_BYTES = 2
_LOGIT_BYTES = 10
"""Per logit when a pass keeps most: 4 in fp32 for the loss, and their gradient in fp32 and 16 bit.
Korthikanti et al. count the 4; PyTorch's cross entropy holds the gradient beside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The shape of one transformer, trained on its language modelling loss."""

    name: str
    family: str
    """llama: RMS norms, gated MLP of three matrices, no biases, no dropout; gpt and bert: layer
    norms and an MLP of two matrices."""
    hidden: int
    layers: int
    heads: int
    mlp: int
    """Inner width of the MLP."""
    vocabulary: int
    sequence: int
    """Tokens of a sample unless something else is asked for."""
    key_value_heads: int = 0
    """Fewer than `heads` where queries share keys; 0: as many."""
    positions: int = 0
    """Learned position embeddings."""
    token_types: int = 0
    """Embeddings of segments (BERT)."""
    tied: bool = True
    """Whether the head multiplies by the embedding of the tokens."""
    attention_biases: int = 4
    """How many of the four projections of an attention have a bias."""
    biases: bool = True
    """Whether MLP and norms have biases."""
    final_norm: bool = True
    dropout: bool = True
    embedding_width: int = 0
    """Of the tokens, where it is not `hidden` and a matrix leads there and back (OPT-350M)."""

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        freeze(self, "key_value_heads", self.key_value_heads or self.heads)
        freeze(self, "embedding_width", self.embedding_width or self.hidden)
        if self.family not in FAMILIES:
            raise ValueError(
                f"{self.name}: unknown family {self.family!r}; known are {', '.join(FAMILIES)}"
            )
        for what in ("hidden", "layers", "heads", "mlp", "vocabulary", "sequence"):
            if getattr(self, what) < 1:
                raise ValueError(f"{self.name}: {what} must be at least 1")
        if self.hidden % self.heads or self.heads % self.key_value_heads:
            raise ValueError(
                f"{self.name}: {self.heads} heads must divide {self.hidden} and be a multiple of "
                f"{self.key_value_heads} key-value heads"
            )

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: three matrices, not two."""
        return self.family == "llama"

    @property
    def embedding_numel(self) -> int:
        """What comes before the first block."""
        rows = self.positions + self.token_types
        tables = self.vocabulary * self.embedding_width + rows * self.hidden
        norm = self._norm_numel if self.family == "bert" else 0
        return tables + norm + self._projection_numel

    @property
    def block_numel(self) -> int:
        """One layer: attention, MLP and two norms."""
        biases = (self.mlp + self.hidden) * self.biases + self.attention_biases * self.hidden
        return self._block_matrices + biases + 2 * self._norm_numel

    @property
    def head_numel(self) -> int:
        """What comes after the last block; without the embedding where that is shared."""
        own = 0 if self.tied else self.vocabulary * self.embedding_width
        if self.family == "bert":  # masked language modelling: dense, norm, a bias per token
            own += self.hidden * (self.hidden + 1) + self.vocabulary
        return own + self._projection_numel + self._norm_numel * self.final_norm

    @property
    def unit_numels(self) -> tuple[int, ...]:
        """Embeddings, every block, head: what is gathered and reduced together."""
        return tuple(numel for _, numel in self._units if numel)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Of those, in words: what a model's own code calls them is not known here."""
        return tuple(name for name, numel in self._units if numel)

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(self.unit_numels)

    @property
    def multiplied_numel(self) -> int:
        """Parameters that every token is multiplied by: all but the tables it is looked up in."""
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
    """A model, tokens of a sample, and what is recomputed: what a pass of one sample takes.

    16-bit parameters and activations, fp32 masters and AdamW.
    """

    architecture: Architecture
    sequence: int = 0
    """Tokens of a sample; 0: the architecture's own."""
    checkpointing: bool = False
    """Keep the input of every block, and compute the block again in the backward."""
    fused_attention: bool = True
    """Attention that never writes its scores (FlashAttention, memory-efficient attention)."""

    def __post_init__(self) -> None:
        if self.sequence < 0:
            raise ValueError(f"sequence must be at least 1, got {self.sequence}")
        object.__setattr__(self, "sequence", self.sequence or self.architecture.sequence)
        if 0 < self.architecture.positions < self.sequence:
            raise ValueError(
                f"{self.architecture.name} has positions for {self.architecture.positions} tokens, "
                f"so a sample cannot have {self.sequence}; give a shorter sequence, or a model "
                "without learned positions"
            )

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward: `6 * parameters * s + 12 * L * h * s^2`.

        Two per multiplication and addition, three times the forward (PaLM, appendix B). The
        attention counts whole, causal or not, and what checkpointing computes twice counts once:
        these are the model's FLOPs, by which utilisation (MFU) is reckoned.
        """
        shape, s = self.architecture, self.sequence
        attention = 12 * shape.layers * shape.hidden * s * s
        return float(6 * shape.multiplied_numel * s + attention)

    @property
    def recomputation(self) -> float:
        """How much longer a pass is for what it computes twice: one forward of three parts."""
        return 4 / 3 if self.checkpointing else 1.0

    @property
    def layer_bytes_per_sample(self) -> float:
        """What the backward of one block needs of its forward.

        Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
        section 4.1: `s h (34 + 5 a s / h)` in 16 bit, the second term being the scores that fused
        attention does not keep. Here term by term, so that it holds for fewer key-value heads,
        another MLP and models without dropout, too. With `k` the key-value heads over the heads and
        `f` the MLP's width over `h`:

            attention  input 2, queries 2, keys and values 4 k, input of its output projection 2
            MLP        input 2 and 4 f (its nonlinearity's input and output), gated 8 f
            norms      4
            dropout    2 (two masks)

        which is 34 for GPT (`k = 1`, `f = 4`). What PyTorch saves for the blocks of transformers'
        models, counted on a CPU: BERT 6 % more, Llama 23 % more (its norms go through fp32), GPT-2
        88 % more, whose GELU is written out in small operations.
        """
        shape, s = self.architecture, self.sequence
        keys = shape.key_value_heads / shape.heads
        mlp = shape.mlp / shape.hidden
        per_element = 12 + 4 * keys + (8 if shape.gated else 4) * mlp + 2 * shape.dropout
        scores = 0 if self.fused_attention else (5 if shape.dropout else 2) * shape.heads * s * s
        return s * shape.hidden * per_element + scores

    @property
    def head_bytes_per_sample(self) -> float:
        """Logits and their gradient, when the backward begins."""
        return _LOGIT_BYTES * float(self.sequence * self.architecture.vocabulary)

    @property
    def activation_bytes_per_sample(self) -> float:
        """What a pass holds per sample when it holds most.

        With checkpointing `2 s h` per block (its input; Korthikanti et al., table 2), and one block
        in full.
        """
        shape, layer = self.architecture, self.layer_bytes_per_sample
        if self.checkpointing:
            inputs = HALF_BYTES * self.sequence * shape.hidden * shape.layers
            return inputs + max(layer, self.head_bytes_per_sample)
        return layer * shape.layers + self.head_bytes_per_sample

    @property
    def produced_bytes_per_sample(self) -> float:
        """What the forward writes for the backward, kept or not: memory traffic goes with it."""
        whole = dataclasses.replace(self, checkpointing=False)
        return whole.activation_bytes_per_sample


def _llama(name: str, *shape: int, key_value_heads: int = 0, sequence: int = 2048) -> Architecture:
    hidden, layers, heads, mlp, vocabulary = shape
    return Architecture(
        name=name,
        family="llama",
        hidden=hidden,
        layers=layers,
        heads=heads,
        mlp=mlp,
        vocabulary=vocabulary,
        sequence=sequence,
        key_value_heads=key_value_heads,
        tied=False,
        attention_biases=0,
        biases=False,
        dropout=False,
    )


def _gpt2(name: str, hidden: int, layers: int, heads: int) -> Architecture:
    return Architecture(
        name=name,
        family="gpt",
        hidden=hidden,
        layers=layers,
        heads=heads,
        mlp=4 * hidden,
        vocabulary=50257,
        sequence=1024,
        positions=1024,
    )


def _mpt(name: str, hidden: int, layers: int, heads: int, vocabulary: int = 50368) -> Architecture:
    # ALiBi instead of positions; no biases anywhere, no dropout.
    return Architecture(
        name=name,
        family="gpt",
        hidden=hidden,
        layers=layers,
        heads=heads,
        mlp=4 * hidden,
        vocabulary=vocabulary,
        sequence=2048,
        attention_biases=0,
        biases=False,
        dropout=False,
    )


def _bert(name: str, hidden: int, layers: int, heads: int) -> Architecture:
    return Architecture(
        name=name,
        family="bert",
        hidden=hidden,
        layers=layers,
        heads=heads,
        mlp=4 * hidden,
        vocabulary=30522,
        sequence=512,
        positions=512,
        token_types=2,
    )


ARCHITECTURES = {
    known.name: known
    for known in (
        # The published 0.5B of Poplar's evaluation is not described where we could read it; these
        # are shapes of our own.
        _llama("llama-0.5b", 1280, 22, 20, 3456, 32000),
        _llama("llama-1.1b", 2048, 22, 32, 5632, 32000, key_value_heads=4),  # TinyLlama
        _llama("llama-7b", 4096, 32, 32, 11008, 32000),
        _llama("llama-13b", 5120, 40, 40, 13824, 32000),
        _llama("llama-3-8b", 4096, 32, 32, 14336, 128256, key_value_heads=8, sequence=8192),
        _gpt2("gpt2-124m", 768, 12, 12),
        _gpt2("gpt2-355m", 1024, 24, 16),
        _gpt2("gpt2-774m", 1280, 36, 20),
        _gpt2("gpt2-1.5b", 1600, 48, 25),
        Architecture(
            name="gpt-neo-2.7b",
            family="gpt",
            hidden=2560,
            layers=32,
            heads=20,
            mlp=10240,
            vocabulary=50257,
            sequence=2048,
            positions=2048,
            attention_biases=1,
        ),
        Architecture(
            name="opt-350m",
            family="gpt",
            hidden=1024,
            layers=24,
            heads=16,
            mlp=4096,
            vocabulary=50272,
            sequence=2048,
            positions=2050,  # two before the first token
            final_norm=False,
            embedding_width=512,
        ),
        _mpt("mpt-125m", 768, 12, 12),
        _mpt("mpt-760m", 1536, 24, 12),
        _mpt("mpt-1b", 2048, 24, 16),
        _mpt("mpt-7b", 4096, 32, 32, 50432),
        _bert("bert-base", 768, 12, 12),
        _bert("bert-large", 1024, 24, 16),
    )
}


def architecture(name: str) -> Architecture:
    """The model with this name, in any case.

    Raises:
        ValueError: no such model; lists those there are.
    """
    known = ARCHITECTURES.get(name.strip().lower())
    if known is None:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(ARCHITECTURES)}")
    return known

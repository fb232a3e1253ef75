"""A layer as values: parameters, work and activations of one sample, in fp32."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 4
"""Of an element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A part of a model that runs after the part before it."""

    name: str
    parameters: int
    flops: float
    """Of the forward, per sample."""
    produced: float
    """Elements that the forward writes, per sample."""
    inputs: float
    """Elements that it reads from the layer before, per sample."""
    outputs: float
    """Elements that the next layer reads, per sample."""
    splits: bool = False
    """Whether ranks can compute parts of its outputs: columns of a matrix, channels, or heads."""
    sums: bool = False
    """Whether ranks can compute from parts of its inputs, which gives parts of a sum."""
    experts: float = 0.0
    """Elements that the experts of this layer exchange per sample, one way; 0: there are none."""
    expert_count: int = 0
    rows: float = 0.0
    """Rows per sample of a linear layer, whose gradient can be sent as factors; 0: it is none."""
    fan_in: int = 0
    fan_out: int = 0
    launches: int = 1
    """Layers whose kernels it launches."""
    block: str = ""
    """Layers with the same block are one group of operators."""

    @property
    def nbytes(self) -> float:
        """Of the parameters, and of their gradients."""
        return float(BYTES * self.parameters)


def joined(layers: list[Layer]) -> Layer:
    """One layer that does the work of several consecutive ones."""
    return Layer(
        name=layers[0].block or layers[0].name,
        parameters=sum(layer.parameters for layer in layers),
        flops=sum(layer.flops for layer in layers),
        produced=sum(layer.produced for layer in layers),
        inputs=layers[0].inputs,
        outputs=layers[-1].outputs,
        launches=len(layers),
    )


def groups(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers with those of one block joined."""
    found: list[list[Layer]] = []
    for layer in layers:
        if found and layer.block and layer.block == found[-1][0].block:
            found[-1].append(layer)
        else:
            found.append([layer])
    return tuple(joined(group) if len(group) > 1 else group[0] for group in found)

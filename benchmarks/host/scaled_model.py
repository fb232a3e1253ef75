"""Llama shapes with every width divided by one factor, so that the host's work dominates a step.

Modules, parameters, their order and their ratios stay. The engine's byte limits and its alignment
are divided too, so that units, flat parameters and the evenness of shards are those of full size;
`check_units` compares both.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from llama import Llama, LlamaConfig

import poplar.comm
import poplar.zero
from poplar.comm import shard_layout
from poplar.comm.shard_layout import Layout
from poplar.hardware.model_shapes import architecture
from poplar.zero import flat_parameter
from poplar.zero.unit import Member, Unit, build_units, find_blocks

CONTEXT = 8
"""Tokens per sample: as few as possible, because only the host's work is measured."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model at full and at scaled size."""

    name: str
    divisor: int
    """Of every width."""
    layers: int | None = None
    """Fewer layers than the architecture has; None: all."""

    def config(self, *, full: bool) -> LlamaConfig:
        """The sizes of the benchmark's Llama."""
        known = architecture(self.name)
        divisor = 1 if full else self.divisor
        for width in (known.hidden, known.mlp, known.vocabulary):
            if width % divisor:
                raise ValueError(f"{self.name}: width {width} is not divisible by {divisor}")
        return LlamaConfig(
            vocabulary=known.vocabulary // divisor,
            width=known.hidden // divisor,
            layers=self.layers or known.layers,
            heads=known.heads,
            kv_heads=known.key_value_heads or known.heads,
            hidden=known.mlp // divisor,
            context=CONTEXT,
        )

    def full_units(self, *, shards_parameters: bool, max_flat_bytes: int | None) -> list[Unit]:
        """The engine's units at full size, without memory; arguments are as for `build_units`."""
        with torch.device("meta"):
            model = Llama(self.config(full=True))
        members = [
            Member(name, parameter, 0, True, torch.bfloat16)
            for name, parameter in model.named_parameters()
        ]
        merge = "blocks" if shards_parameters else "all"
        return build_units(
            *(model, members, find_blocks(model)), merge=merge, max_flat_bytes=max_flat_bytes
        )


SHAPES = {
    "llama-7b": Shape(name="llama-7b", divisor=64),
    "llama-1.1b": Shape(name="llama-1.1b", divisor=32),
}


@contextmanager
def scaled_limits(shape: Shape) -> Iterator[None]:
    """A context in which the engine's byte limits are scaled as matrices, its alignment as vectors.

    Every limit is a constant of a module in `poplar.zero` or `poplar.comm` named `*_BYTES`.
    """
    alignment = max(1, shard_layout.ALIGNMENT // shape.divisor)
    with ExitStack() as stack:
        for package in (poplar.zero, poplar.comm):
            for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
                module = importlib.import_module(found.name)
                for name, value in vars(module).items():
                    if name.endswith("_BYTES") and name.isupper() and isinstance(value, int):
                        scaled = max(1, value // shape.divisor**2)
                        stack.enter_context(mock.patch.object(module, name, scaled))
        # Elsewhere it is the size of the operators' blocks, which stays.
        for module in (shard_layout, flat_parameter):
            stack.enter_context(mock.patch.object(module, "ALIGNMENT", alignment))
        cut = Layout.from_shares.__func__  # its default argument is the alignment
        stack.enter_context(mock.patch.object(cut, "__defaults__", (alignment,)))
        yield


def check_units(shape: Shape, full: Sequence[Unit], scaled: Sequence[Unit], ranks: int) -> None:
    """Raise unless both sizes have the same units, flat parameters and evenness of shards."""
    expected = [_description(unit, ranks) for unit in full]
    with scaled_limits(shape):
        found = [_description(unit, ranks) for unit in scaled]
    for one, other in zip(expected, found, strict=True):
        if one != other:
            raise ValueError(f"units differ from full size: {other}, at full size {one}")


def _description(unit: Unit, ranks: int) -> tuple[object, ...]:
    step = ranks * shard_layout.ALIGNMENT
    flats = [(flat.names, flat.dtype, flat.numel % step == 0) for flat in unit.flats]
    return (unit.name, unit.resident, *flats)

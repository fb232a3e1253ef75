"""Lightning's precision plugins; the optimizer, which holds the sharded gradients, clips them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType

from poplar.optimizer import HeteroZeroOptimizer


class _ClipsSharded(Precision):
    """Clips through `HeteroZeroOptimizer.clip_grad_norm_`."""

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val <= 0:
            return
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            raise ValueError(
                "PoplarStrategy clips gradients by norm only, got "
                f"gradient_clip_algorithm={str(gradient_clip_algorithm)!r}; use 'norm'"
            )
        sharded: HeteroZeroOptimizer = optimizer
        sharded.clip_grad_norm_(float(clip_val))


class FullPrecision(_ClipsSharded):
    """`precision="32-true"`."""


class AutocastPrecision(_ClipsSharded, MixedPrecision):
    """`precision="bf16-mixed"`: fp32 parameters, forward under autocast."""


def supported(plugin: Precision | None) -> Precision:
    """The plugin that replaces one of Lightning's.

    Raises:
        ValueError: a precision that `PoplarStrategy` does not support.
    """
    if plugin is None or type(plugin) is Precision:
        return FullPrecision()
    if isinstance(plugin, _ClipsSharded):
        return plugin
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return AutocastPrecision("bf16-mixed", plugin.device)
    raise ValueError(
        f"PoplarStrategy supports precision='32-true' and 'bf16-mixed', got {plugin.precision!r} "
        f"({type(plugin).__name__}); for parameters that compute in bf16 or fp16 over fp32 master "
        "values, use '32-true' and PoplarStrategy(compute_dtype=torch.bfloat16)"
    )

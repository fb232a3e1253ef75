"""What `.grad` is while the gradient is not there: a tensor that raises when it is used.

Code that clips or scales `.grad`, such as `torch.nn.utils.clip_grad_norm_`, would otherwise find no
gradients, change nothing, and train without clipping. Code that assigns to `.grad` replaces the
placeholder, which is noticed when the pass or the step is closed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PlaceholderGradient(Tensor):
    """The `.grad` of a parameter whose gradient is sharded, or not final yet. It has no memory."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> PlaceholderGradient:
        made: PlaceholderGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __init__(self, parameter: Tensor) -> None:
        """`parameter`: whose shape, dtype and device it takes, as torch requires of `.grad`."""

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return "<the gradient is not in .grad; see optimizer.full_gradients()>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        raise RuntimeError(_NOT_HERE)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.add_.Tensor:  # autograd accumulates
            raise RuntimeError(SECOND_BACKWARD)
        raise RuntimeError(_NOT_HERE)


_ATTRIBUTES = ("device", "dtype", "grad", "is_leaf", "layout", "ndim", "requires_grad", "shape")
_DESCRIPTIONS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
}
"""What may be asked about it: tools look at all tensors of a process."""

_NOT_HERE = (
    "the gradient is not in .grad: at stages 1 to 3 it is sharded over the ranks, and inside of a "
    "micro_batches loop it is not final. Clip with optimizer.clip_grad_norm_(max_norm) after the "
    "loop or train_step(..., max_norm=...), scale the loss with poplar.GradScaler, and read "
    "gradients with optimizer.full_gradients()"
)

SECOND_BACKWARD = (
    "a backward after Poplar has taken the gradients. Run one backward per micro-batch "
    "(add the losses first), and call step() and zero_grad() before the next step"
)


def replaced_after_the_passes(rank: int, name: str) -> RuntimeError:
    """The error if `.grad` of a parameter was set to a tensor at a stage that shards gradients."""
    return RuntimeError(
        f"rank {rank}: .grad of {name!r} was set to a tensor, but at stages 1 to 3 the gradient is "
        "sharded over the ranks and not in .grad, so the update would ignore it. Use stage 0, or "
        "change the loss; .grad = None leaves a parameter out of the step at every stage"
    )


def put_back(rank: int, name: str) -> RuntimeError:
    """The error if `.grad` was None when the gradient was read, and is what it was before again."""
    return RuntimeError(
        f"rank {rank}: .grad of {name!r} was None in clip_grad_norm_() or unscale_(), which has "
        "left its gradient out of the step, and now it is what it was before. Leave it None until "
        "step(); to clip only some gradients at stage 0, set it to a clone, or scale .grad yourself"
    )


def replaced_in_the_loop(rank: int, name: str) -> RuntimeError:
    """The error if `.grad` of a parameter was set in a pass that had taken the gradient."""
    return RuntimeError(
        f"rank {rank}: .grad of {name!r} was set inside of the micro_batches loop, where its "
        "gradient has been added to that of the step already. Set it after the loop, on every rank "
        "(in Lightning: in on_before_optimizer_step): to None at every stage, to a tensor at stage "
        "0 only"
    )

"""The hooks around `step()` that users register, run as `torch.optim.Optimizer` runs them.

torch would run them around the whole of `step()`, after the ranks have agreed on the step; here
`step()` runs them itself, so that the ranks also agree on what a hook raises.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)


def has_pre_hooks(optimizer: Optimizer) -> bool:
    """Whether code of the user runs before `step()`."""
    return bool(_global_optimizer_pre_hooks or optimizer._optimizer_step_pre_hooks)


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether code of the user runs before or after `step()`."""
    after = _global_optimizer_post_hooks or optimizer._optimizer_step_post_hooks
    return has_pre_hooks(optimizer) or bool(after)


def run_pre_hooks(optimizer: Optimizer, closure: Any) -> Any:
    """Run the hooks before `step()`; returns the closure to call, which they may replace."""
    args, kwargs = _arguments(optimizer, closure), dict[str, Any]()
    hooks = optimizer._optimizer_step_pre_hooks
    for hook in chain(_global_optimizer_pre_hooks.values(), hooks.values()):
        result = hook(optimizer, args, kwargs)
        if result is None:
            continue
        if not isinstance(result, tuple) or len(result) != 2:
            raise RuntimeError(
                f"a step pre-hook must return None or a tuple (args, kwargs), got {result}"
            )
        args, kwargs = result
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def run_post_hooks(optimizer: Optimizer, closure: Any) -> None:
    """Run the hooks after `step()`."""
    args, hooks = _arguments(optimizer, closure), optimizer._optimizer_step_post_hooks
    for hook in chain(hooks.values(), _global_optimizer_post_hooks.values()):
        hook(optimizer, args, {})


def _arguments(optimizer: Optimizer, closure: Any) -> tuple[Any, ...]:
    return (optimizer,) if closure is None else (optimizer, closure)

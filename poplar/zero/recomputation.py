"""Activation checkpointing of units, on the ranks that the plan names.

A recomputed module keeps the inputs of its forward, and the backward runs the forward again for the
other tensors that it needs. Gradients have the same bits. Only the module's attribute `forward`
changes: names, state-dict keys and hooks stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from poplar.values.plan import Plan
from poplar.zero.model_hook import plain_forward
from poplar.zero.passes.collective_pass import in_backward
from poplar.zero.unit import blocks_of

_Prepare = Callable[[nn.Module, Any], None]
"""Called with the module and its inputs before its forward runs again in a backward."""


class Recomputation:
    """Which modules of a model are recomputed on this rank."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], prepare: Mapping[nn.Module, _Prepare]
    ) -> None:
        """Nothing is recomputed yet.

        `blocks` are the modules that may be, in registration order. What `prepare` has for a module
        must be called before its forward runs again.
        """
        self._modules = dict(model.named_modules())
        self.blocks = tuple(blocks)
        self._prepare = prepare
        self._changed: dict[str, _RecomputedForward] = {}

    def follow(self, plan: Plan | None, rank: int) -> None:
        """Recompute exactly the units that the plan names for this rank."""
        units = () if plan is None else plan.recomputed_units(rank)
        self.recompute(name for unit in units for name in blocks_of(unit, self.blocks))

    def recompute(self, names: Iterable[str]) -> None:
        """Recompute exactly these modules."""
        wanted = dict.fromkeys(names)
        for name in [name for name in self._changed if name not in wanted]:
            self._changed.pop(name).remove()
        for name in wanted:
            if name not in self._changed:
                module = self._modules[name]
                self._changed[name] = _RecomputedForward(module, self._prepare.get(module))

    def remove(self) -> None:
        """Recompute nothing, as before."""
        self.recompute(())


class _RecomputedForward:
    """Takes the place of a module's `forward`."""

    def __init__(self, module: nn.Module, prepare: _Prepare | None) -> None:
        self._module, self._prepare = module, prepare
        self._is_own = "forward" in vars(module)
        """The module has a `forward` of its own, besides that of its class."""
        self._forward: Callable[..., Any] = module.forward
        self._batch_norms = [one for one in module.modules() if isinstance(one, _BatchNorm)]
        self._active = True
        module.forward = self

    def remove(self) -> None:
        """Give the module its `forward` back, also if another wrapper was put around it since."""
        self._active = False
        if vars(self._module).get("forward") is not self:
            return
        if self._is_own:
            self._module.forward = self._forward
        else:
            del self._module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._active or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # torch restores the random state only of devices of positional arguments.
        values, structure = tree_flatten((args, kwargs))

        def run(*values: Any) -> Any:
            args, kwargs = tree_unflatten(values, structure)
            if torch.compiler.is_compiling() or not in_backward():
                return self._forward(*args, **kwargs)
            if self._prepare is not None:
                self._prepare(self._module, args)
            with _statistics_kept(self._batch_norms):
                return self._forward(*args, **kwargs)

        return checkpoint(run, *values, use_reentrant=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has the plain `forward`: it does not belong to the engine."""
        return plain_forward, (self._forward,)


@contextmanager
def _statistics_kept(batch_norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """The running statistics do not count the same samples twice."""
    kept = [dict(one._buffers) for one in batch_norms]
    for one in batch_norms:
        one._buffers = {name: b if b is None else b.clone() for name, b in one._buffers.items()}
    try:
        yield
    finally:
        for one, buffers in zip(batch_norms, kept, strict=True):
            one._buffers = buffers

"""Whole tensors for `StateDictOptions(full_state_dict=True)` of torch.

torch gathers a state dict by `_gather_state_dict`, which knows its own sharded tensors only and
passes others on, so that rank 0 would save its own part for the whole. It has no hook for other
classes, so `install` wraps it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict as torch_state_dict

if TYPE_CHECKING:
    from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor

Path = tuple[Any, ...]
"""The keys that lead to a value."""


def install() -> None:
    """Let torch's functions gather `ShardTensor`s. Repeated calls do nothing."""
    module: Any = torch_state_dict
    torch_gathers: Callable[..., dict[str, Any]] = module._gather_state_dict
    if hasattr(torch_gathers, "__wrapped__"):
        return

    @functools.wraps(torch_gathers)
    def gather(state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        return torch_gathers(whole_state(state_dict, **options), **options)

    module._gather_state_dict = gather


def whole_state(
    state_dict: Mapping[str, Any],
    *,
    cpu_offload: bool = False,
    ranks_only: tuple[int, ...] = (),
    **_: Any,
) -> dict[str, Any]:
    """A state dict with whole tensors in place of `ShardTensor`s. Collective.

    Args:
        state_dict: with the same keys on all ranks.
        cpu_offload: they are on the CPU.
        ranks_only: the ranks that get them, by their number in the default group; other ranks get
            None for each. Default: all.
    """
    known = _exchange_unknown(state_dict)
    keeps = not ranks_only or dist.get_rank() in ranks_only

    def replace(path: Path, value: Any) -> Any:
        if path in known:
            return known[path].to(value.device)
        if not _is_part(value):
            return value
        whole = value.full_tensor()
        if not keeps:
            return None
        return whole.cpu() if cpu_offload else whole

    replaced: dict[str, Any] = _map_leaves(state_dict, (), replace)
    return replaced


def _exchange_unknown(state_dict: Mapping[str, Any]) -> dict[Path, Tensor]:
    """State that a rank does not know, such as the step of parameters of others. Collective."""
    leaves: dict[Path, Any] = {}
    _map_leaves(state_dict, (), leaves.setdefault)
    parts = {path: value for path, value in leaves.items() if _is_part(value)}
    control = next((part.owners.control for part in parts.values() if part.owners), None)
    if control is None:
        return {}
    what = "gathering a state dict"
    mine = {path for path, part in parts.items() if part.is_unknown}
    unknown = set[Path]().union(*control.exchange_objects(mine, what=what))
    if not unknown:
        return {}
    held = {path: leaves[path].cpu() for path in unknown - mine}
    by_rank = control.exchange_objects(held, what=what)
    return {path: value for held in reversed(by_rank) for path, value in held.items()}


def _is_part(value: Any) -> TypeGuard[ShardTensor]:
    from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor

    return isinstance(value, ShardTensor)


def _map_leaves(value: Any, path: Path, function: Callable[[Path, Any], Any]) -> Any:
    """Apply a function to all that is no dict, list or tuple."""
    if isinstance(value, Mapping):
        return {key: _map_leaves(part, (*path, key), function) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_leaves(p, (*path, n), function) for n, p in enumerate(value))
    return function(path, value)

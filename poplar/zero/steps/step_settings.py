"""The settings of a step that must be equal on all ranks: every rank updates its part with its own.

They are compared in the exchange that closes the step, by a number that is computed on the host. A
setting that is a tensor is not read on the host: its checksum travels with the gradient norm.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

UPDATES = "the number of updates since the last load"

_BITS = (1 << 52) - 1
"""A float64 holds so many bits exactly."""
_ODD = 0x1E3779B97F4A7C15
_NONE, _NAN, _TENSOR, _OTHER = 0x5A17, 0x5A18, 0x5A19, 0x5A1A
"""Numbers for values without a number of their own."""


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a param group: all but its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class StepSettings:
    """What this rank takes a step with."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        updates: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale: Tensor | None = None,
        has_hooks: bool = False,
    ) -> None:
        """
        Args:
            updates: how many updates this rank has applied.
            max_norm: to which the gradient is clipped, as far as that is known.
            scale: the loss scale, or its inverse.
            has_hooks: hooks run around the update. Not compared: the ranks agree after the hooks.
        """
        self.norm_type, self.has_hooks = norm_type, has_hooks
        self._groups = groups
        self._further = {"max_norm": max_norm, "norm_type": norm_type, UPDATES: updates}
        self._further["the use of a loss scaler"] = scale is not None
        self.tensors = [] if scale is None else [("the loss scale", scale)]
        """The settings that are tensors, with their names."""
        numbers = [_number(value) for value in self._further.values()]
        for index, group in enumerate(groups):
            for key, value in settings_in(group).items():
                if isinstance(value, Tensor):
                    self.tensors.append((_name(key, index), value))
                numbers.append(_number(value))
        self._has_nan = _NAN in numbers
        self.digest = float(hash(tuple(numbers)) & _BITS)
        """Equal on ranks whose settings are equal, apart from the values of tensors."""

    def check(self) -> None:
        """Raise ValueError for a setting with which the step would spoil the parameters."""
        max_norm = self._further["max_norm"]
        if _number(max_norm) < 0:
            raise ValueError(f"max_norm={max_norm} would reverse the gradient; give at least 0")
        if self._has_nan:
            names = [name for name, value in self.by_name().items() if value == "nan"]
            raise ValueError(f"{', '.join(names)}: nan, which the step would make of parameters")

    def checksum(self, device: torch.device) -> Tensor:
        """A checksum of `tensors`: one int64 on `device`. The host does not synchronize."""
        total = torch.zeros((), dtype=torch.int64, device=device)
        for _, value in self.tensors:
            whole = value.detach().to(device, torch.float64, non_blocking=True).sum()
            total = total * _ODD + whole.view(torch.int64)
        return total

    def by_name(self) -> dict[str, str]:
        """All settings as text, for messages. Synchronizes with the device."""
        named = dict(self._further)
        for index, group in enumerate(self._groups):
            for key, value in settings_in(group).items():
                if _number(value) not in (_OTHER, _TENSOR):
                    named[_name(key, index)] = value
        return {name: repr(_plain(value)) for name, value in [*named.items(), *self.tensors]}


def _name(key: str, group: int) -> str:
    return f"{key} of param group {group}"


def _plain(value: Any) -> Any:
    """The Python numbers in a value of PyTorch or NumPy."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(value: Any) -> Any:
    """What has the same hash in every process, if the values are equal."""
    if isinstance(value, float):
        return value if value == value else _NAN
    if isinstance(value, int):
        return value
    if value is None:
        return _NONE
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    if isinstance(value, (tuple, list)):
        return tuple(map(_number, value))
    if isinstance(value, Tensor):
        return _TENSOR
    return _number(_plain(value)) if hasattr(value, "tolist") else _OTHER

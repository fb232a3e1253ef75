"""A profiling request: checked on this rank, agreed by all ranks, with an identity."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import poplar
from poplar.comm import Control
from poplar.data import pytree
from poplar.plan import STRATEGIES
from poplar.system import devices, host_limits
from poplar.zero import setup
from poplar.zero.agreement import raise_on_any_error
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.unit import Member, build_units
from poplar.zero.update import OptimizerFactory

DEFAULT_MAX_BATCH = 1024
"""Largest batch that is tried if neither memory nor time sets a limit."""

_ONLY_VALUES = frozenset({"lr", "betas", "eps"})
"""Optimizer options that do not change times or memory."""
_PER_RANK = (
    "device",
    "host",
    "driver",
    "cores",
    "quota",
    "threads",
    "matmul_precision",
    "max_batch",
    "memory_limit",
)
"""Entries of the identity that may differ between ranks."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `profile_cluster` on this rank."""

    model: nn.Module
    loss_fn: LossFunction
    example: Any
    optimizer_class: OptimizerFactory
    optimizer_options: Mapping[str, Any]
    max_batch: int | None
    memory_limit: int | None
    stages: Sequence[int]
    seconds: float
    max_norm: float | None
    units: Sequence[str | nn.Module | type[nn.Module]] | None
    compute_dtype: torch.dtype | str
    reduce_dtype: torch.dtype
    allow_batch_norm: bool

    def check(self) -> None:
        """Check what needs no communication.

        Raises:
            ValueError, TypeError: an argument is wrong; says how to fix it.
        """
        if isinstance(self.optimizer_class, torch.optim.Optimizer):
            name = type(self.optimizer_class).__name__
            raise TypeError(
                f"optimizer_class must be a class, got an instance of {name}; pass "
                f"optimizer_class={name} and its options as keyword arguments, such as lr=1e-3"
            )
        if self.max_batch is not None and not _is_count(self.max_batch):
            raise ValueError(
                f"max_batch must be an integer above 0, got {self.max_batch!r}; it is the largest "
                "micro-batch that is tried on this rank"
            )
        if self.memory_limit is not None and not _is_count(self.memory_limit):
            raise ValueError(
                f"memory_limit must be a number of bytes, an integer above 0, got "
                f"{self.memory_limit!r}; leave it out to use what the device has"
            )
        unknown = [s for s in self.stages if isinstance(s, bool) or s not in range(len(STRATEGIES))]
        if unknown or not self.stages:
            raise ValueError(f"stages must be ZeRO stages from 0 to 3, got {self.stages}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")
        if pytree.samples_in(self.example) < 1:
            raise ValueError("example_batch has no samples; give at least one")


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks know about each other before anything is measured."""

    setup: setup.Request
    dtype: torch.dtype | None
    """Compute dtype; None: the dtype of the parameters."""
    device: torch.device
    everyones: tuple[Mapping[str, Any], ...]
    """By rank, its entries of the identity."""
    identity: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks_on_this_host(self) -> int:
        """Number of ranks on this rank's host, which share its memory."""
        host = devices.describe(self.device).host
        return sum(own["host"] == host for own in self.everyones)


def agree_on(request: Request, control: Control) -> Agreed:
    """Check the request on all ranks, compare, and build the identity. Collective.

    Raises:
        ValueError, TypeError: an argument of this rank is wrong, or ranks differ.
        RankFailed: an argument of another rank is wrong.
    """
    error: Exception | None = None
    try:
        request.check()
        checked = setup.check_request(
            request.model,
            request.optimizer_class,
            request.optimizer_options,
            plan=None,
            stage=0,
            params=None,
            units=request.units,
            compute_dtype=request.compute_dtype,
            reduce_dtype=request.reduce_dtype,
            world_size=control.group.size,
            allow_batch_norm=request.allow_batch_norm,
        )
        own = _own(request, checked)
    except Exception as caught:
        error = caught
    raise_on_any_error(control, error, doing="profiling")
    dtype = setup.agree_on_request(control, checked)
    everyones = control.exchange_objects(own, what="profiling")
    for key in ("stages", "seconds", "max_norm", "loss_fn", "versions"):
        values = [other[key] for other in everyones]
        if len(set(map(str, values))) > 1:
            raise ValueError(
                f"the ranks disagree on {key}: {dict(enumerate(values))}; profile with the same "
                "arguments and versions on every rank"
            )
    identity = _identity(checked, request, dtype, everyones)
    return Agreed(
        setup=checked,
        dtype=dtype,
        device=checked.device,
        everyones=tuple(everyones),
        identity=identity,
    )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Elements of the units and flat buffers that the engine builds."""

    trained: tuple[int, ...]
    """Trained elements of each unit that has any."""
    names: tuple[str, ...]
    """Names of the same units."""
    frozen: tuple[int, ...]
    """Elements of the same units that are unsharded with them and not trained."""
    resident: tuple[int, ...]
    """Numbers of the units that stay unsharded until a pass is over."""
    flats: tuple[int, ...]
    """Elements of each flat buffer that is reduced."""


def sizes_of(agreed: Agreed, *, gathers: bool) -> Sizes:
    """Elements of units and flat buffers.

    Args:
        agreed: of this rank.
        gathers: for a stage that unshards parameters, unit by unit.
    """
    checked = agreed.setup
    members = [
        Member(name, parameter, group, group >= 0, parameter.dtype)
        for name, parameter in checked.model.named_parameters()
        for group in (checked.group_of.get(id(parameter), -1),)
        if gathers or group >= 0
    ]
    merge = setup.merge_policy(checked, shards_parameters=gathers)
    units = build_units(checked.model, members, checked.unit_names, merge=merge)
    units = [unit for unit in units if unit.trained]
    return Sizes(
        trained=tuple(sum(flat.numel for flat in unit.trained) for unit in units),
        names=tuple(unit.name for unit in units),
        frozen=tuple(sum(f.numel for f in unit.flats if not f.trained) for unit in units),
        resident=tuple(number for number, unit in enumerate(units) if unit.resident),
        flats=tuple(flat.numel for unit in units for flat in unit.trained),
    )


def _own(request: Request, checked: setup.Request) -> dict[str, Any]:
    """This rank's entries of the identity, as plain values."""
    info = devices.describe(checked.device)
    on_cpu = checked.device.type == "cpu"
    return {
        "device": f"{info.name} {info.uuid}".strip(),
        "host": info.host,
        "driver": info.driver,
        "cores": info.cores,
        "quota": host_limits.processor_quota() if on_cpu else None,
        "threads": torch.get_num_threads() if on_cpu else 0,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "max_batch": request.max_batch,
        "memory_limit": request.memory_limit,
        "stages": list(request.stages),
        "seconds": request.seconds,
        "max_norm": request.max_norm,
        "loss_fn": _name(request.loss_fn),
        "versions": f"poplar {poplar.__version__}, torch {torch.__version__}",
        "example": _signature(request.example),
    }


def _identity(
    checked: setup.Request,
    request: Request,
    dtype: torch.dtype | None,
    everyones: Sequence[Mapping[str, Any]],
) -> dict[str, str]:
    shared = checked.identity()
    first = everyones[0]
    texts = {
        "model": f"{type(checked.model).__name__} {_digest([shared['model'], shared['buffers']])}",
        "structure": _digest([str(checked.model), _switches(checked.model)]),
        "units": _digest(shared["units"]),
        "optimizer": f"{shared['optimizer']} {_timed(shared['optimizer options'])}",
        "compute_dtype": str(dtype if dtype is not None else "as the model is"),
        "reduce_dtype": str(request.reduce_dtype),
        "example": ", ".join(dict.fromkeys(own["example"] for own in everyones)),
        "world_size": str(len(everyones)),
    }
    texts.update({key: str(first[key]) for key in ("stages", "max_norm", "loss_fn")})
    texts["versions"] = first["versions"]
    for key in _PER_RANK:
        texts[key] = _by_rank([own[key] for own in everyones])
    return texts


def _switches(model: nn.Module) -> list[dict[str, bool | str]]:
    """Flags and strings of modules, such as the training mode or activation checkpointing."""
    return [
        {key: value for key, value in vars(module).items() if isinstance(value, (bool, str))}
        for module in model.modules()
    ]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _timed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer options that its time and memory may depend on."""
    return {key: value for key, value in options.items() if key not in _ONLY_VALUES}


def _by_rank(values: Sequence[Any]) -> str:
    return str(values[0]) if len(set(values)) == 1 else str(list(values))


def _signature(example: Any) -> str:
    """What determines the time of a batch: dtypes, and shapes without the batch dimension."""
    tensors = pytree.tensors(example)
    return " ".join(f"{list(t.shape[1:])}:{t.dtype}" for t in tensors if isinstance(t, Tensor))


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]

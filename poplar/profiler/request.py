"""A profiling request: checked on this rank, agreed by all ranks, with an identity."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import poplar
from poplar.comm import Control
from poplar.data import pytree
from poplar.plan import STRATEGIES
from poplar.system import devices, host_limits
from poplar.zero import setup
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.update import OptimizerFactory

DEFAULT_MAX_BATCH = 1024
"""Largest batch that is tried if neither memory nor time sets a limit."""

_ONLY_VALUES = frozenset({"lr", "betas", "eps"})
"""Optimizer options that do not change times or memory."""


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
        if self.max_batch is not None and not is_count(self.max_batch):
            raise ValueError(
                f"max_batch must be an integer above 0, got {self.max_batch!r}; it is the largest "
                "micro-batch that is tried on this rank"
            )
        if self.memory_limit is not None and not is_count(self.memory_limit):
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

    def must_be_equal(self) -> dict[str, Any]:
        """What must be equal on all ranks, because they would otherwise wait for each other."""
        return {
            "stages": list(self.stages),
            "seconds": self.seconds,
            "max_norm": self.max_norm,
            "loss_fn": _name(self.loss_fn),
            "versions": f"poplar {poplar.__version__}, torch {torch.__version__}",
        }


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks know about each other before anything is measured."""

    setup: setup.Request
    dtype: torch.dtype | None
    """Compute dtype; None: the dtype of the parameters."""
    hosts: tuple[str, ...]
    """By rank."""
    identity: Mapping[str, str]

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.setup.device

    @property
    def ranks_on_this_host(self) -> int:
        """Number of ranks on this rank's host, which share its memory."""
        return self.hosts.count(devices.describe(self.device).host)


def agree_on(request: Request, control: Control) -> Agreed:
    """Check the request on all ranks, compare, and build the identity. Collective.

    Raises:
        ValueError, TypeError: an argument of this rank is wrong, or ranks differ.
        RankFailed: an argument of another rank is wrong.
    """

    def check() -> tuple[setup.Request, dict[str, Any], dict[str, Any]]:
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
        return checked, request.must_be_equal(), _of_this_rank(request, checked)

    checked, *own = run_on_all_ranks(control, check, doing="profiling")
    dtype = setup.agree_on_request(control, checked)
    equal, by_rank = zip(*control.exchange_objects(own, what="profiling"), strict=True)
    for key in equal[0]:
        values = [other[key] for other in equal]
        if len(set(map(str, values))) > 1:
            raise ValueError(
                f"the ranks disagree on {key}: {dict(enumerate(values))}; use the same arguments "
                "and versions on every rank"
            )
    return Agreed(
        setup=checked,
        dtype=dtype,
        hosts=tuple(other["host"] for other in by_rank),
        identity=_identity(checked, dtype, equal[0], by_rank),
    )


def _of_this_rank(request: Request, checked: setup.Request) -> dict[str, Any]:
    """Entries of the identity that may differ between ranks, as plain values."""
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
        "example": _signature(request.example),
    }


def _identity(
    checked: setup.Request,
    dtype: torch.dtype | None,
    equal: Mapping[str, Any],
    by_rank: Sequence[Mapping[str, Any]],
) -> dict[str, str]:
    """What a profile is valid for. The time budget and the values of an update do not matter."""
    shared = checked.identity()
    options = shared["optimizer options"].items()
    timed_options = {key: value for key, value in options if key not in _ONLY_VALUES}
    return {
        "model": f"{type(checked.model).__name__} {digest([shared['model'], shared['buffers']])}",
        "structure": digest([str(checked.model), _switches(checked.model)]),
        "units": digest(shared["units"]),
        "optimizer": f"{shared['optimizer']} {timed_options}",
        "compute_dtype": str(dtype if dtype is not None else "as the model is"),
        "reduce_dtype": str(checked.reduce_dtype),
        "world_size": str(len(by_rank)),
        **{key: str(equal[key]) for key in ("stages", "max_norm", "loss_fn", "versions")},
        **{key: _one_or_list([own[key] for own in by_rank]) for key in by_rank[0]},
    }


def _switches(model: nn.Module) -> list[dict[str, bool | str]]:
    """Flags and strings of modules, such as the training mode or activation checkpointing."""
    return [
        {key: value for key, value in vars(module).items() if isinstance(value, (bool, str))}
        for module in model.modules()
    ]


def is_count(value: Any) -> bool:
    """Whether the value is an integer above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def digest(content: Any) -> str:
    """16 hexadecimal digits that identify JSON content."""
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]


def _one_or_list(values: Sequence[Any]) -> str:
    return str(values[0]) if len(set(values)) == 1 else str(list(values))


def _signature(example: Any) -> str:
    """What determines the time of a batch: dtypes, and shapes without the batch dimension."""
    tensors = pytree.tensors(example)
    return " ".join(f"{list(t.shape[1:])}:{t.dtype}" for t in tensors if isinstance(t, Tensor))


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))

"""From a model and a plan to an engine: checked on every rank, agreed by all, then built.

Nothing is touched before all ranks have agreed that they hold the same model and the same plan, so
a mistake on one rank leaves every model as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from poplar.comm import Communicator, Control
from poplar.plan import Plan
from poplar.zero import model_checks
from poplar.zero.agreement import raise_on_any_error
from poplar.zero.engine import STRATEGIES, Engine
from poplar.zero.flat_adamw import flat_class
from poplar.zero.unit import Member, Merge, Unit, build_units, resolve_units
from poplar.zero.unit_plans import (
    check_unit_names,
    check_unit_plans,
    persistent_units,
    shares_by_unit,
)
from poplar.zero.update import OptimizerFactory, ShardedUpdate, check_elementwise, fastest_options

Groups = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for, as checked on this rank."""

    model: nn.Module
    factory: OptimizerFactory
    options: Mapping[str, Any]
    groups: Groups
    stage: int
    plan: Plan | None
    unit_names: Sequence[str]
    units_are_named: bool
    """By the user; otherwise they were found."""
    compute_dtype: torch.dtype | str
    reduce_dtype: torch.dtype
    device: torch.device
    group_of: dict[int, int] = field(default_factory=dict)
    """Param group of each parameter that is trained, by id."""

    @property
    def shard_optimizer_class(self) -> OptimizerFactory:
        """What steps the shards as the user's class does, and fastest."""
        return flat_class(self.factory, self.options, self.device)

    def identity(self) -> dict[str, Any]:
        """What must be equal on all ranks, in words that an error can quote."""
        return {
            "plan": self.plan.digest() if self.plan is not None else "none",
            "stage": self.stage,
            "optimizer": getattr(self.factory, "__name__", repr(self.factory)),
            "optimizer options": _comparable(self.options),
            "param groups": [_comparable(group) for group in self.groups],
            "units": list(self.unit_names),
            "compute_dtype": str(self.compute_dtype),
            "reduce_dtype": str(self.reduce_dtype),
            "model": [
                (name, tuple(p.shape), str(p.dtype), self.group_of.get(id(p), -1))
                for name, p in self.model.named_parameters()
            ],
            "buffers": [
                (name, tuple(b.shape), str(b.dtype)) for name, b in self.model.named_buffers()
            ],
        }


def check_request(
    model: nn.Module,
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    *,
    plan: Plan | None,
    stage: int | None,
    params: Iterable[Any] | None,
    units: Sequence[str | nn.Module | type[nn.Module]] | None,
    compute_dtype: torch.dtype | str,
    reduce_dtype: torch.dtype,
    world_size: int,
    allow_batch_norm: bool,
) -> Request:
    """Check on this rank alone what can be checked there.

    Raises:
        ValueError, TypeError, RuntimeError: what is wrong, and the way out.
    """
    model_checks.reject_wrapped(model)
    if not allow_batch_norm:
        model_checks.reject_batch_norm(model_checks.batch_norms(model))
    chosen = _stage_of(plan, stage, world_size)
    groups = _param_groups(model, params)
    named = list(model.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"params: group {index} has a parameter of shape {tuple(parameter.shape)} "
                    f"that the model does "
                    "not have; optimize the model's own parameters"
                )
            if parameter.requires_grad:
                group_of[id(parameter)] = index
    device = model_checks.check_parameters(named, set(group_of))
    for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
        allowed = (torch.float32, torch.bfloat16, torch.float16)
        if dtype not in allowed and not (name == "compute_dtype" and dtype == "auto"):
            raise ValueError(
                f"{name}={dtype!r} is not supported; use torch.float32, torch.bfloat16 or "
                f"torch.float16"
            )
    if plan is not None:
        check_unit_plans(plan)
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding):
            raise TypeError(
                f"module {name!r} has sparse gradients; flat buffers are dense: build the "
                "embedding with sparse=False"
            )
    options = fastest_options(factory, options)
    complaint = check_elementwise(factory, options, device)
    if complaint is not None:
        name = getattr(factory, "__name__", repr(factory))
        raise ValueError(
            f"{name} can't update flat shards, which cut parameters anywhere: {complaint}. Use an "
            f"elementwise "
            "optimizer: AdamW, Adam, SGD, RMSprop, Adagrad, ..."
        )
    factory([dict(group) for group in groups], **options)  # what torch refuses, before any change
    return Request(
        model=model,
        factory=factory,
        options=options,
        groups=groups,
        stage=chosen,
        plan=plan,
        unit_names=resolve_units(model, units),
        units_are_named=units is not None,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        device=device,
        group_of=group_of,
    )


def agree_on_request(control: Control, request: Request) -> torch.dtype | None:
    """Compare all ranks' requests; returns the compute dtype (None: as it is). Collective.

    Raises:
        ValueError: ranks differ, or can't compute in the dtype that was asked for; on every rank.
    """
    mine = (request.identity(), _computes_bf16(request.device), request.device.type)
    received = control.exchange_objects(mine, what="building the optimizer")
    identities = [identity for identity, _, _ in received]
    for key, expected in identities[0].items():
        differing = [rank for rank, other in enumerate(identities) if other[key] != expected]
        if differing:
            raise ValueError(
                _mismatch_message(key, expected, identities[differing[0]][key], differing)
            )
    if len({kind for _, _, kind in received}) > 1:
        raise ValueError(
            f"the ranks' models lie on {[kind for _, _, kind in received]}; all on cuda or all on "
            f"cpu"
        )
    lacking = [rank for rank, (_, bf16, _) in enumerate(received) if not bf16]
    if request.compute_dtype is torch.bfloat16 and lacking:
        raise ValueError(
            f"compute_dtype=torch.bfloat16, but the devices of rank(s) {lacking} compute it by "
            f"emulation "
            "(compute capability below 8.0); use torch.float16 with poplar.GradScaler, or 'auto'"
        )
    if isinstance(request.compute_dtype, torch.dtype):
        return request.compute_dtype
    floating = {p.dtype for p in request.model.parameters() if p.is_floating_point()}
    if request.device.type == "cpu" or floating != {torch.float32}:
        return None
    return torch.float16 if lacking else torch.bfloat16


def build_engine(
    request: Request, comm: Communicator, control: Control, compute_dtype: torch.dtype | None
) -> tuple[Engine, ShardedUpdate]:
    """Take the model over. Collective: the first rank's values and buffers become everybody's."""
    plan, world = request.plan, comm.group.size
    strategy = STRATEGIES[request.stage](comm, request.reduce_dtype)
    shares = plan.shares if plan is not None else (1.0 / world,) * world
    members, recast = [], []
    for name, parameter in request.model.named_parameters():
        trained = id(parameter) in request.group_of
        dtype = parameter.dtype
        if compute_dtype is not None and parameter.is_floating_point():
            dtype = compute_dtype
        if trained or strategy.shards_parameters:
            group = request.group_of.get(id(parameter), -1)
            members.append(Member(name, parameter, group, trained, dtype))
        elif dtype is not parameter.dtype:
            recast.append((parameter, dtype))
    of_their_own = shares_by_unit(plan)
    units = build_units(
        request.model,
        members,
        request.unit_names,
        merge="none"
        if of_their_own
        else merge_policy(request, shards_parameters=strategy.shards_parameters),
    )
    _check_unit_names(control, plan, units)
    strategy.persistent = persistent_units(plan, units)
    _broadcast_unmanaged(request.model, units, comm)
    for parameter, dtype in recast:
        parameter.data = parameter.data.to(dtype)
    for unit in units:
        for flat in unit.flats:
            strategy.initialize(flat, of_their_own.get(unit.name, shares))
    engine = Engine(request.model, units, strategy, comm, control)
    hyper = [
        {key: value for key, value in group.items() if key != "params"} for group in request.groups
    ]
    update = ShardedUpdate(request.shard_optimizer_class, engine.trained, hyper, request.options)
    return engine, update


def merge_policy(request: Request, *, shards_parameters: bool) -> Merge:
    """Which small units travel together."""
    if not shards_parameters:
        return "all"
    return "none" if request.units_are_named else "blocks"


def _broadcast_unmanaged(model: nn.Module, units: Sequence[Unit], comm: Communicator) -> None:
    """Broadcast the first rank's buffers, and parameters that no flat buffer will broadcast."""
    flat = {id(p) for unit in units for flat in unit.flats for p in flat.parameters}
    rest = [(name, p.data) for name, p in model.named_parameters() if id(p) not in flat]
    for name, tensor in [*rest, *model.named_buffers()]:
        if tensor.numel() and tensor.device.type == units[0].flats[0].device.type:
            whole = tensor.contiguous()
            comm.broadcast(whole, 0, what=f"the broadcast of {name}")
            if whole is not tensor:
                tensor.copy_(whole)


def _check_unit_names(control: Control, plan: Plan | None, units: Sequence[Unit]) -> None:
    error: Exception | None = None
    try:
        check_unit_names(plan, units)
    except ValueError as caught:
        error = caught
    raise_on_any_error(control, error, doing="building the optimizer")


def _stage_of(plan: Plan | None, stage: int | None, world_size: int) -> int:
    if plan is None:
        if stage is None:
            raise ValueError(
                "give a plan, or a stage (0, 1, 2 or 3) for even batches and shares at that stage"
            )
        if stage not in range(len(STRATEGIES)):
            raise ValueError(f"stage={stage!r} is not a ZeRO stage; use 0, 1, 2 or 3")
        return stage
    if stage is not None and stage != plan.stage:
        raise ValueError(
            f"stage={stage} contradicts the plan's stage {plan.stage}; leave stage out"
        )
    if plan.world_size != world_size:
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, but the process group has {world_size}; "
            "plan again for this group, or start as many processes as the plan has ranks"
        )
    return plan.stage


def _param_groups(model: nn.Module, params: Iterable[Any] | None) -> Groups:
    given: list[Any] = (
        list(params) if params is not None else [p for p in model.parameters() if p.requires_grad]
    )
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for group in given:
        inside = group["params"]
        inside = [inside] if isinstance(inside, torch.Tensor) else list(inside)
        inside = [p[1] if isinstance(p, tuple) else p for p in inside]
        groups.append({**group, "params": inside})
    return groups


def _comparable(values: Mapping[str, Any]) -> dict[str, str]:
    """The values that have the same text in every process."""
    kinds = (bool, int, float, str, tuple, list, type(None))
    return {
        key: repr(value)
        for key, value in values.items()
        if key != "params" and isinstance(value, kinds)
    }


def _computes_bf16(device: torch.device) -> bool:
    """Really, not by emulation as `torch.cuda.is_bf16_supported()` counts it."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _mismatch_message(key: str, expected: Any, found: Any, ranks: Sequence[int]) -> str:
    if key == "model":
        pairs = zip([*expected, ("nothing",)], [*found, ("nothing",)], strict=False)
        expected, found = next((a, b) for a, b in pairs if a != b)
        key = "model (first differing parameter: name, shape, dtype, param group)"
    return (
        f"the ranks disagree on the {key}: rank 0 has {_truncated(expected)}, rank(s) "
        f"{list(ranks)} have {_truncated(found)}; build the same model, plan and optimizer on "
        "every rank"
    )


def _truncated(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."

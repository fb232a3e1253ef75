"""Builds the engine from a model and a plan, after all ranks have agreed on both.

Nothing changes before the agreement, so a mistake on one rank leaves the model of every rank
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from poplar import ops
from poplar.comm import Communicator, Control, Group
from poplar.comm.shard_layout import Layout
from poplar.system.kernel_settings import precisions
from poplar.values.communication import BITS, Communication, Precision
from poplar.values.errors import agreed, check_class
from poplar.values.plan import Plan
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.checks import model_checks
from poplar.zero.checks.replica_check import replicate
from poplar.zero.engine import Engine
from poplar.zero.factors.layers import factored_layers
from poplar.zero.factors.parameter import FactoredParameter
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.held_memory import OnOutOfMemory
from poplar.zero.input_cast import cast_inputs
from poplar.zero.opaque_parameter import (
    OpaqueBytes,
    component_tensors,
    is_opaque,
    memories_of,
    opaque_bytes,
    opaque_tensors,
)
from poplar.zero.optimizers.granularity import Granularity, OptimizerFactory, step_of
from poplar.zero.optimizers.optimizer_class import OptimizerClass, optimizer_classes
from poplar.zero.stages.replicated import Replicated
from poplar.zero.stages.sharded_gradients import ShardedGradients
from poplar.zero.stages.sharded_optimizer import ShardedOptimizer
from poplar.zero.stages.sharded_parameters import ShardedParameters
from poplar.zero.stages.strategy import Layouts, Strategy
from poplar.zero.steps.nonfinite import OnNonFinite
from poplar.zero.steps.step_settings import settings_in
from poplar.zero.unit import (
    Cut,
    Member,
    Merge,
    Unit,
    build_units,
    check_unit_names,
    resolve_units,
    shares_by_unit,
)
from poplar.zero.update import ShardedUpdate
from poplar.zero.weights.initial_values import InitialValues, Weights

Groups = list[dict[str, Any]]

STRATEGY_CLASSES: tuple[type[Strategy], ...] = (
    Replicated,
    ShardedOptimizer,
    ShardedGradients,
    ShardedParameters,
)
"""By ZeRO stage."""

_MULTIPLICATION = (
    "multiplication of rows (Plan.factored at stage 0, where every rank computes all products; use "
    "stage 1, or leave factored out of the plan)"
)
OPAQUE = "frozen tensors that are not computed with"
"""The entry of `Request.identity` with the opaque tensors."""
BUILDING = "building the optimizer"
"""What the ranks do, in messages."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of `HeteroZeroOptimizer`, which documents them."""

    model: nn.Module
    optimizer_class: OptimizerFactory
    options: Mapping[str, Any]
    """Keyword arguments of the class."""
    plan: Plan | None = None
    stage: int | None = None
    params: Iterable[Any] | None = None
    units: Sequence[str | nn.Module | type[nn.Module]] | None = None
    compute_dtype: torch.dtype | str = "auto"
    reduce_dtype: torch.dtype = torch.float32
    communication: Precision | Communication | None = None
    allow_forward_state: bool = False
    weights: Weights = None
    device: torch.device | str | None = None
    on_out_of_memory: OnOutOfMemory = "retry"
    on_nonfinite: OnNonFinite = "raise"
    granularity: Granularity | None = None
    local: Collection[str] = ()
    """Names of parameters of which each rank has a part of its own."""


@dataclass(frozen=True, kw_only=True)
class Request(Arguments):
    """The user's arguments, checked on this rank, and what they lead to."""

    stage: int
    communication: Communication
    """Of the plan, or without one."""
    device: torch.device
    classes: tuple[OptimizerClass, ...]
    """The optimizer class of each param group."""
    groups: Groups
    group_of: dict[int, int]
    """Index of the param group of each trained parameter, by `id(parameter)`."""
    unit_names: Sequence[str]
    values: InitialValues
    factored: Mapping[str, nn.Linear]
    """The modules of `Plan.factored`, by name."""
    cut: Cut | None = None
    """How the engine is cut, which ranks that join it later follow; None: as `units_of` finds."""
    cast_to: torch.dtype | None
    """The dtype that `compute_dtype` leads to on these ranks; None: that of each parameter."""
    dtypes: Mapping[nn.Parameter, torch.dtype]
    """Of each parameter, before it was cast."""

    def identity(self) -> dict[str, Any]:
        """What must be equal on all ranks, as text for error messages."""
        return {
            "communication": repr(self.communication),
            "plan": _description(self.plan),
            "stage": self.stage,
            "optimizer": [cls.name for cls in self.classes],
            "optimizer options": [_comparable(cls.options) for cls in self.classes],
            "granularity": [cls.granularity for cls in self.classes],
            "param groups": [_comparable(group) for group in self.groups],
            "units": list(self.unit_names),
            "compute_dtype": str(self.compute_dtype),
            "on_out_of_memory": self.on_out_of_memory,
            "on_nonfinite": self.on_nonfinite,
            "reduce_dtype": str(self.reduce_dtype),
            "values of the model": self.values.identity,
            "model": [
                (name, self._shape(name, p), str(p.dtype), self.group_of.get(id(p), -1))
                for name, p in self.model.named_parameters()
            ],
            OPAQUE: [
                (name, opaque_bytes(tensor)) for name, tensor in self.opaque_tensors().items()
            ],
            "buffers": [
                (name, tuple(b.shape), str(b.dtype)) for name, b in self.model.named_buffers()
            ],
            _MULTIPLICATION: self._multiplication(),
        }

    def under(self, plan: Plan) -> Request:
        """The same with another plan, of the active ranks."""
        return replace(self, plan=plan, stage=plan.stage, communication=plan.communication)

    def change_identity(self) -> dict[str, str]:
        """What must be equal on all ranks of another plan during training."""
        return {
            "plan": _description(self.plan),
            _MULTIPLICATION: self._multiplication(),
        }

    def computing_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """In which all ranks compute with a parameter; [Note: opaque tensors] are never cast."""
        if self.cast_to is None or (id(parameter) not in self.group_of and is_opaque(parameter)):
            return parameter.dtype
        return self.cast_to

    def exact_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Of the exact values: that of the masters, or of a frozen parameter before its cast."""
        return torch.float32 if id(parameter) in self.group_of else self.dtypes[parameter]

    def is_rounded(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter that is not trained was cast to fewer bits."""
        before = self.dtypes.get(parameter, parameter.dtype)
        return id(parameter) not in self.group_of and parameter.dtype.itemsize < before.itemsize

    def opaque_tensors(self) -> dict[str, Tensor]:
        """The frozen tensors of [Note: opaque tensors] that have values, by name."""
        return opaque_tensors(self.model, self.group_of)

    def _multiplication(self) -> str:
        """What decides the bits of a product, if every rank must compute the same ones."""
        if not (self.factored and STRATEGY_CLASSES[self.stage].replicates_state):
            return ""
        return multiplication_on(self.device)

    def _shape(self, name: str, parameter: nn.Parameter) -> tuple[int, ...] | str:
        return "local" if name in self.local else tuple(parameter.shape)


def check_request(given: Arguments, group: Group) -> Request:
    """Check the arguments of this rank alone.

    Raises:
        ValueError, TypeError, RuntimeError: what is wrong and how to fix it.
    """
    model, plan, communication = given.model, given.plan, given.communication
    check_class("model", model, nn.Module)
    check_choice("on_out_of_memory", given.on_out_of_memory, OnOutOfMemory)
    check_choice("on_nonfinite", given.on_nonfinite, OnNonFinite)
    model_checks.reject_wrapped(model)
    model_checks.reject_scripted(model)
    batch_norms = model_checks.batch_norms(model)
    model_checks.reject_batch_norm(batch_norms, allowed=given.allow_forward_state)
    model_checks.reject_sparse_embeddings(model)
    model_checks.reject_embeddings_by_micro_batch(model, allowed=given.allow_forward_state)
    model_checks.reject_sparse_buffers(model)
    stage = _stage_of(plan, given.stage, group.size)
    if isinstance(communication, str) and communication not in BITS:
        raise ValueError(
            f"communication={communication!r}; use {' or '.join(map(repr, BITS))}, or a "
            "Communication. ('auto' is for poplar.autotune and poplar.search.)"
        )
    if communication is not None or plan is None:
        sent = Communication.of(communication or "exact", stage)
        sent.check(stage, host_state=plan is not None and bool(plan.host_state))
        plan = None if plan is None else replace(plan, communication=sent)
    else:
        sent = plan.communication
    groups = _param_groups(model, given.params)
    group_of = _group_indices(model, groups)
    found = model_checks.check_parameters(list(model.named_parameters()), set(group_of))
    device = _device_for(found, given.device, group.default_device)
    _check_operators(device)
    if found.type == "cpu" != device.type:
        model_checks.check_movable(list(model.named_parameters()), device)
    _check_dtype("compute_dtype", given.compute_dtype, allowed=("auto",))
    _check_dtype("reduce_dtype", given.reduce_dtype)
    factored = factored_layers(model, plan.factored if plan is not None else (), set(group_of))
    classes = optimizer_classes(
        given.optimizer_class, given.options, groups, device, given.granularity
    )
    check_stage(classes, stage, given.local)
    if plan is not None and plan.host_state:
        _check_on_host(classes)
    unit_names = resolve_units(model, given.units)
    checked = {"plan": plan, "stage": stage, "communication": sent, "device": device}
    values = InitialValues.of(model, unit_names, given.weights)
    if group.size > 1 and group.rank == 0:
        model_checks.warn_of_ungrouped(list(model.named_parameters()), set(group_of), stacklevel=5)
    return Request(
        **(vars(given) | checked),
        classes=classes,
        groups=groups,
        group_of=group_of,
        unit_names=unit_names,
        values=values,
        factored=factored,
        cast_to=given.compute_dtype if isinstance(given.compute_dtype, torch.dtype) else None,
        dtypes={parameter: parameter.dtype for parameter in model.parameters()},
    )


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise ValueError if the argument `name` has none of the values of the `Literal` choices."""
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"{name}={value!r}; use {' or '.join(map(repr, known))}")


def _device_for(
    found: torch.device, device: torch.device | str | None, default: torch.device
) -> torch.device:
    """The device of the parameters, which are on `found` now."""
    if device is None:
        return default if found.type == "meta" else found
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    if found.type not in ("meta", "cpu") and found != chosen:
        raise ValueError(
            f"device={str(device)!r}, but the parameters are on {found}; move the model first, or "
            "build it on the CPU or on meta"
        )
    return chosen


def _group_indices(model: nn.Module, groups: Groups) -> dict[int, int]:
    """Index of the param group of each trained parameter, by `id(parameter)`."""
    known = {id(parameter) for parameter in model.parameters()}
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if not isinstance(parameter, torch.Tensor):
                raise TypeError(
                    f"params: group {index} has {parameter!r}, which is no parameter; pass "
                    "parameters of the model, or param groups with them"
                )
            if id(parameter) not in known:
                raise ValueError(
                    f"params: group {index} has a parameter of shape {tuple(parameter.shape)} "
                    "that the model does not have; optimize the model's own parameters"
                )
            if parameter.requires_grad:
                group_of[id(parameter)] = index
    return group_of


def _check_dtype(name: str, dtype: torch.dtype | str, *, allowed: Sequence[str] = ()) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, *allowed):
        raise ValueError(
            f"{name}={dtype!r} is not supported; use torch.float32, torch.bfloat16 or torch.float16"
        )


def stages_of(classes: Sequence[OptimizerClass]) -> tuple[int, ...]:
    """The stages at which these classes can train."""
    whole = any(cls.granularity == "parameter" for cls in classes)
    strategies = enumerate(STRATEGY_CLASSES)
    return tuple(stage for stage, one in strategies if not (whole and one.shards_parameters))


def check_stage(classes: Sequence[OptimizerClass], stage: int, local: Collection[str]) -> None:
    """Check that a stage, and local parameters, give the classes what they need."""
    strategy = STRATEGY_CLASSES[stage]
    if local and not strategy.allows_local:
        raise ValueError(f"local parameters need stage 1, got stage {stage}")
    for cls in classes:
        if stage not in stages_of([cls]):
            raise ValueError(
                f"{cls.name} needs whole tensors, but stage 3 divides the parameters of every unit "
                "among the ranks; use stage 2, or an optimizer that can update parts"
            )
        if cls.granularity != "elements" and local:
            raise ValueError(
                f"{cls.name} cannot update parameters of which each rank has a part of its own; "
                "use an elementwise optimizer such as AdamW"
            )


def _check_operators(device: torch.device) -> None:
    """Raise if the operators cannot run on this device."""
    if device.type != "cuda":
        return
    if problem := ops.problem_on(torch.cuda.get_device_capability(device)):
        raise ValueError(f"{torch.cuda.get_device_name(device)}: {'; '.join(problem)}")


def _check_on_host(classes: Sequence[OptimizerClass]) -> None:
    """Check that the classes can update state in host memory."""
    for cls in classes:
        if (problem := cls.problem_on(torch.device("cpu"))) is not None:
            raise ValueError(
                f"{cls.name} cannot update state in host memory, as the plan's host_state asks: "
                f"{problem}. Use AdamW, or a plan without it (search with host_state='never')"
            )


def agree_on_request(
    control: Control, request: Request, *, also: Mapping[str, Any] | None = None
) -> Request:
    """Compare the requests of all ranks; returns that of this rank with `cast_to`. Collective.

    `also` has further values to compare, by name.

    Raises:
        ValueError: on every rank, if requests differ or a rank cannot compute in the given dtype.
    """
    identity = {**request.identity(), **(also or {})}
    device = request.device
    # `torch.cuda.is_bf16_supported()` also counts emulation.
    bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    mine = identity, bf16, device.type
    received = control.exchange_objects(mine, what=BUILDING)
    compare_identities(control, [identity for identity, _, _ in received])
    devices = [device for _, _, device in received]
    if len(set(devices)) > 1:
        raise agreed(
            ValueError(
                f"the models of the ranks are on {devices}; move all of them to cuda, or all to cpu"
            )
        )
    by_rank = control.group.by_name(received)
    lacking = [rank for rank, (_, bf16, _) in by_rank.items() if not bf16]
    if request.compute_dtype is torch.bfloat16 and lacking:
        raise agreed(
            ValueError(
                f"compute_dtype=torch.bfloat16, but the devices of rank(s) {lacking} only emulate "
                "it (compute capability below 8.0); use torch.float16 with poplar.GradScaler, or "
                "'auto'"
            )
        )
    if isinstance(request.compute_dtype, torch.dtype):
        return request
    plain = {p.dtype for p in request.model.parameters() if p.is_floating_point()}
    if request.device.type == "cpu" or plain != {torch.float32} or request.opaque_tensors():
        return request
    return replace(request, cast_to=torch.float16 if lacking else torch.bfloat16)


def compare_identities(control: Control, identities: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError on all ranks if what they have, by name, is not equal."""
    by_rank = control.group.by_name(identities)
    for key, expected in identities[0].items():
        differing = [rank for rank, other in by_rank.items() if other[key] != expected]
        if differing:
            found = by_rank[differing[0]][key]
            ranks = control.group.names[0], differing
            raise agreed(ValueError(_mismatch_message(key, expected, found, *ranks)))


def build_engine(
    request: Request,
    comm: Communicator,
    control: Control,
    check_step: Callable[[], None] = lambda: None,
) -> tuple[Engine, ShardedUpdate]:
    """Build engine and update; all ranks get the first rank's values and buffers. Collective."""
    strategy = strategy_of(request, comm)
    _move_to_device(request, shards_parameters=strategy.shards_parameters)
    with request.values.real_tensors(request.device):
        sharded = strategy.shards_parameters
        units = units_of(request, control, shards_parameters=sharded)
        check = partial(check_unit_names, request.plan, units, request.unit_names)
        run_on_all_ranks(control, check, doing=BUILDING)
        layouts = place_state(strategy, units, request.plan)
        request.values.place(layouts, strategy, control)
        for opaque in (opaque for unit in units for opaque in unit.opaque):
            packed = opaque.packed_bytes()
            what = {f"the frozen tensors of unit {opaque.name}": packed}
            replicate(what, comm, control, doing=BUILDING)
            place_opaque(opaque, packed, request.plan, comm)
    replicate(unmanaged_tensors(request, units), comm, control, doing=BUILDING)
    cast_parameters(request, [parameter for _, parameter in _unmanaged(request, units)])
    engine = assemble_engine(request, units, strategy, control, check_step)
    update = new_update(request, engine.trained)
    compare_kernels(engine, update, BUILDING)
    return engine, update


def prepare_without_engine(request: Request) -> None:
    """Give the model of a rank that is left out the device and dtypes of the others. Local."""
    if not request.values.on_meta:
        _move_to_device(request, shards_parameters=False)
        cast_parameters(request, request.model.parameters())


def cast_parameters(request: Request, parameters: Iterable[nn.Parameter]) -> None:
    """Cast parameters that are in no flat parameter to the dtype in which ranks compute. Local."""
    for parameter in parameters:
        if (dtype := request.computing_dtype(parameter)) != parameter.dtype:
            parameter.data = parameter.data.to(dtype)


def undo_cast(request: Request) -> None:
    """Give all parameters the dtypes that they had before the optimizer was built. Local."""
    for parameter, dtype in request.dtypes.items():
        if parameter.dtype != dtype:
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)


def new_update(request: Request, flats: Sequence[FlatParameter]) -> ShardedUpdate:
    """The update of flat parameters, without state. Local."""
    settings = list(map(settings_in, request.groups))
    return ShardedUpdate(request.classes, flats, settings)


def strategy_of(request: Request, comm: Communicator, *, steps: int = 0) -> Strategy:
    """A new strategy of the stage, in a training that has ended so many steps."""
    strategy = STRATEGY_CLASSES[request.stage](comm, request.reduce_dtype, request.device)
    strategy.continue_after(steps)
    strategy.communicate(request.communication)
    return strategy


def assemble_engine(
    request: Request,
    units: Sequence[Unit],
    strategy: Strategy,
    control: Control,
    check_step: Callable[[], None],
) -> Engine:
    """The engine of units that have their values. Local."""
    names = request.unit_names
    engine = Engine(request.model, units, strategy, control, blocks=names, check_step=check_step)
    engine.follow(request.plan)
    engine.add_changes(cast_inputs(request.model, request.cast_to, names))
    return engine


def changed_request(request: Request, plan: Plan, world_size: int) -> Request:
    """The request of now with another plan, for so many ranks: all, or the active ones. Local.

    Raises:
        ValueError: the plan is for other ranks or factors other layers, or the optimizer class does
            not support its stage or host state.
    """
    before = request.plan.factored if request.plan is not None else ()
    if plan.factored != before:
        raise ValueError(
            f"apply_plan cannot change which layers are factored; got {list(plan.factored)}, now "
            f"they are {list(before)}. Keep them (dataclasses.replace(plan, factored=...)), or "
            "build a new optimizer for this plan"
        )
    check_stage(request.classes, _stage_of(plan, None, world_size), request.local)
    if plan.host_state:
        _check_on_host(request.classes)
    return request.under(plan.of_active_ranks())


def changes_units(old: Request, new: Request) -> bool:
    """Whether another engine is needed: of another stage, or with units that may be cut anew."""
    has_own_shares = [bool(shares_by_unit(request.plan)) for request in (old, new)]
    return old.stage != new.stage or has_own_shares == [False, True]


def place_state(strategy: Strategy, units: Sequence[Unit], plan: Plan | None) -> Layouts:
    """Choose which flat parameters will have their state in host memory, by a plan. Local.

    Returns how the plan divides all flat parameters.
    """
    rank = strategy.comm.group.rank
    shares, own_shares = _shares(plan, strategy.comm)
    flats = [flat for unit in units for flat in unit.flats]
    layouts = strategy.layouts({flat: own_shares.get(flat.name, shares) for flat in flats})
    trained = {flat: layouts[flat] for flat in flats if flat.trained}
    hosted = set(strategy.hosted(trained, plan.part_on_host(rank) if plan is not None else 0.0))
    for flat in trained:
        flat.keep_on_host(flat in hosted)
        flat.send_differences(strategy.sends_differences and not flat.is_local)
    return layouts


def compare_kernels(engine: Engine, update: ShardedUpdate, doing: str) -> None:
    """Send updates that others compute too, if these may round differently there. Collective."""
    own = [_kernels(flat.master.device) for flat in engine.trained]
    kernels = engine.control.exchange_objects(own, what=doing)
    if not update.has_exact_kernel and any(other != own for other in kernels):
        engine.strategy.gather_updates()


def _move_to_device(request: Request, *, shards_parameters: bool) -> None:
    """Move a model from the CPU to this rank's device, except opaque tensors that are sharded.

    What is sharded moves in shares, so that no device needs memory for all of it.
    """
    if request.device.type == "cpu":
        return
    opaque = list(request.opaque_tensors().values())
    tensors = {id(t): t for t in (*request.model.parameters(), *request.model.buffers())}
    kept: set[int] = set()
    for tensor, memories in zip(opaque, memories_of(request.model, opaque), strict=True):
        tensors.pop(id(tensor))
        tensors.update({id(part): part for part in component_tensors(tensor)})
        if shards_parameters:
            kept.update(id(part) for memory in memories for part in memory)
    for tensor in (tensor for number, tensor in tensors.items() if number not in kept):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.to(request.device)


def with_cut(request: Request, control: Control) -> Request:
    """The request with the cut of a new engine. Local."""
    sharded = STRATEGY_CLASSES[request.stage].shards_parameters
    cut = _cut(request, control, _members(request, control, sharded), sharded)
    return replace(request, cut=cut)


def units_of(request: Request, control: Control, *, shards_parameters: bool) -> list[Unit]:
    """The units of an engine, whose flat parameters have no values yet."""
    members = _members(request, control, shards_parameters)
    merge, limit = request.cut or _cut(request, control, members, shards_parameters)
    given = request.model, members, request.unit_names
    return build_units(*given, merge=merge, max_flat_bytes=limit, device=request.device)


def _cut(
    request: Request, control: Control, members: Sequence[Member], shards_parameters: bool
) -> Cut:
    merge: Merge = "blocks" if shards_parameters else "all"
    if shares_by_unit(request.plan) or (shards_parameters and request.units is not None):
        merge = "none"
    numel = sum(member.numel for member in members)
    return Cut(merge, control.max_flat_bytes(request.device, numel))


def _members(request: Request, control: Control, shards_parameters: bool) -> list[Member]:
    """What the units consist of: frozen parameters only where parameters are sharded."""
    factored = {
        id(layer.weight): partial(FactoredParameter, layer=layer, control=control)
        for layer in request.factored.values()
    }
    opaque = request.opaque_tensors() if shards_parameters else {}
    memories = memories_of(request.model, list(opaque.values()))
    members = [
        Member(name, tensor, -1, False, tensor.dtype, memories=inside)
        for (name, tensor), inside in zip(opaque.items(), memories, strict=True)
        if inside
    ]
    for name, parameter in request.model.named_parameters():
        trained = id(parameter) in request.group_of
        if trained or (shards_parameters and not is_opaque(parameter)):
            group = request.group_of.get(id(parameter), -1)
            dtype = request.computing_dtype(parameter)
            kind = factored.get(id(parameter))
            step = None
            if trained:
                step = step_of(request.classes[group].granularity, parameter.numel())
            is_local = name in request.local
            members.append(Member(name, parameter, group, trained, dtype, kind, step, is_local))
    return members


def _shares(
    plan: Plan | None, comm: Communicator
) -> tuple[Sequence[float], Mapping[str, Sequence[float]]]:
    """The shares of the ranks, and those of the units that have their own."""
    world = comm.group.size
    return plan.shares if plan is not None else (1.0 / world,) * world, shares_by_unit(plan)


def place_opaque(
    opaque: OpaqueBytes, packed: Tensor, plan: Plan | None, comm: Communicator
) -> None:
    """Keep this rank's share of the opaque tensors of a unit, whose bytes are `packed`. Local."""
    layout = opaque_layout(opaque, plan, comm)
    low, high = layout.bounds(comm.group.rank)
    opaque.divide(layout, comm.share(packed[low:high].clone()))
    opaque.allocate()
    opaque.detach_parameters()


def opaque_layout(opaque: OpaqueBytes, plan: Plan | None, comm: Communicator) -> Layout:
    """How the opaque tensors of a unit are divided under a plan."""
    shares, own_shares = _shares(plan, comm)
    return Layout.from_shares(opaque.numel, own_shares.get(opaque.name, shares))


def unmanaged_tensors(request: Request, units: Sequence[Unit]) -> dict[str, Tensor]:
    """By name, the parameters and buffers of the model that are in no unit, on its device. Local.

    All ranks have their values.
    """
    sharded = {id(tensor) for unit in units for o in unit.opaque for tensor in o.holders}
    return {
        f"{name} ({number})" if number else name: part
        for name, tensor in (*_unmanaged(request, units), *request.model.named_buffers())
        for number, part in enumerate(component_tensors(tensor))
        if id(part) not in sharded and part.numel() and part.device.type == request.device.type
    }


def _unmanaged(request: Request, units: Sequence[Unit]) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are in no unit, except local ones."""
    managed = {id(p) for unit in units for flat in unit.flats for p in flat.parameters}
    return [
        (name, parameter)
        for name, parameter in request.model.named_parameters()
        if id(parameter) not in managed and name not in request.local
    ]


def _stage_of(plan: Plan | None, stage: int | None, world_size: int) -> int:
    if plan is None:
        if stage is None:
            raise ValueError(
                "neither plan nor stage was given; pass a plan, or stage=0, 1, 2 or 3 for even "
                "batches and shares"
            )
        if stage not in range(len(STRATEGY_CLASSES)):
            raise ValueError(f"stage={stage!r} is not a ZeRO stage; use 0, 1, 2 or 3")
        return stage
    if stage is not None and stage != plan.stage:
        raise ValueError(
            f"stage={stage} differs from the plan's stage {plan.stage}; leave stage out"
        )
    if plan.world_size != world_size:
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, but the process group has {world_size}; "
            "make a plan for this group, or start as many processes as the plan has ranks"
        )
    return plan.stage


def _param_groups(model: nn.Module, params: Iterable[Any] | None) -> Groups:
    is_list = isinstance(params, Iterable | None) and not isinstance(params, torch.Tensor | dict)
    if not is_list or (isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList)):
        what = "tensor" if isinstance(params, torch.Tensor) else type(params).__name__
        raise TypeError(f"params is one {what}; pass a list of parameters, or of param groups")
    given: list[Any] = (
        list(params) if params is not None else [p for p in model.parameters() if p.requires_grad]
    )
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for group in given:
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        names = [p[0] for p in members if isinstance(p, tuple)]  # as `torch.optim` takes them
        members = [p[1] if isinstance(p, tuple) else p for p in members]
        named = {"param_names": names} if names else {}
        groups.append({**group, "params": members, **named})
    return groups


def _description(plan: Plan | None) -> str:
    """Text that is equal if the plans are, apart from predictions; it begins with what differs."""
    if plan is None:
        return "none"
    shares = ", ".join(f"{share:.4g}" for share in plan.shares)
    return (
        f"{plan.digest()[:16]} (stage {plan.stage}, global batch {plan.global_batch}, "
        f"micro-batches {plan.micro_batches}, shares {shares})"
    )


def _comparable(values: Mapping[str, Any]) -> dict[str, str]:
    """The values whose text is the same in every process."""
    types = (bool, int, float, str, tuple, list, type(None))
    return {
        key: repr(value)
        for key, value in values.items()
        if key != "params" and isinstance(value, types)
    }


def multiplication_on(device: torch.device) -> str:
    """What decides the bits of a product on this rank."""
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{_kernels(device)}, precisions [{precisions()}]{threads}"


def _kernels(device: torch.device) -> str:
    """What decides how the kernels of an optimizer round: their machine code."""
    if device.type == "cuda":
        code = f"{torch.version.cuda} {torch.cuda.get_device_capability(device)}"
    else:
        code = torch.backends.cpu.get_cpu_capability()
    return f"{torch.__version__} {code}"


def _mismatch_message(
    key: str, expected: Any, found: Any, first: int, differing: Sequence[int]
) -> str:
    if key == "model":
        pairs = zip([*expected, ("nothing",)], [*found, ("nothing",)], strict=False)
        expected, found = next((a, b) for a, b in pairs if a != b)
        key = "model (first differing parameter: name, shape, dtype, param group)"
    return (
        f"the ranks disagree on the {key}: rank {first} has {_truncated(expected)}, rank(s) "
        f"{list(differing)} have {_truncated(found)}; use the same model, arguments and versions "
        "on every rank"
    )


def _truncated(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."

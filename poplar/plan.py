"""Plans: each rank's micro-batches and its share of the training state.

A `Plan` is frozen, hashable and checked on creation: its micro-batches sum to the global batch, its
shares to 1, and at stages 2 and 3 all ranks have the same number of passes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from poplar import _core, plan_table

STRATEGIES = ("replicated", "sharded_optimizer", "sharded_gradients", "sharded_parameters")
"""What is sharded, by stage: nothing, + optimizer state, + gradients, + parameters."""

FIRST_STAGE_SYNCHRONIZING_EVERY_PASS = STRATEGIES.index("sharded_gradients")
"""From this stage on ranks synchronize at every pass, before it once per step."""
_SYNCHRONIZING_EVERY_PASS = frozenset(STRATEGIES[FIRST_STAGE_SYNCHRONIZING_EVERY_PASS:])
_GATHERS = "sharded_parameters"
GATHERS = STRATEGIES.index(_GATHERS)
"""The first stage at which parameters are sharded."""
_SCHEMA_VERSION = 1
_SHARE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The settings of one unit: parameters that are unsharded and reduced together."""

    name: str
    strategy: str
    """One of `STRATEGIES`."""
    shares: tuple[float, ...] | None = field(default=None, kw_only=True)
    """Fraction of this unit owned by each rank; None: the plan's shares."""
    keep_gathered: bool = field(default=False, kw_only=True)
    """At stage 3: unshard the parameters once per step, in the first pass, instead of twice per
    pass. Costs their memory between passes."""
    transport: str | None = field(default=None, kw_only=True)
    """Transport of this unit; None: the fastest one that was measured."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"UnitPlan.name must be a string, got {self.name!r}")
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"unit {self.name!r}: unknown strategy {self.strategy!r}; use one of "
                f"{', '.join(STRATEGIES)}"
            )
        if not isinstance(self.keep_gathered, bool):
            raise TypeError(
                f"unit {self.name!r}: keep_gathered must be True or False, got "
                f"{self.keep_gathered!r}"
            )
        if self.keep_gathered and self.strategy != _GATHERS:
            raise ValueError(
                f"unit {self.name!r}: keep_gathered with strategy {self.strategy!r}, which does "
                f"not shard parameters; use it only with {_GATHERS!r} (stage 3)"
            )
        if self.transport is not None and not isinstance(self.transport, str):
            raise TypeError(
                f"unit {self.name!r}: transport must be a name or None, got {self.transport!r}"
            )
        if self.shares is not None:
            object.__setattr__(self, "shares", _checked_shares(self.shares, f"unit {self.name!r}"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How to run a training step on unequal ranks.

    Create one with `even`, `manual` or `proportional`, or directly:

        Plan(stage=2, global_batch=12, micro_batches=((1, 4), (1, 4), (0, 2)), shares=(0.5, 0.5, 0))
    """

    stage: int
    """ZeRO stage: 0 replicated, 1 optimizer state sharded, 2 + gradients, 3 + parameters."""
    global_batch: int
    """Samples per optimizer step, over all ranks."""
    micro_batches: tuple[tuple[int, ...], ...]
    """`micro_batches[r][s]`: samples of pass `s` on rank `r`, 0 allowed. At stages 0 and 1 ranks
    may have different numbers of passes; `()` is a rank without samples."""
    shares: tuple[float, ...]
    """Fraction of every sharded buffer that each rank owns, 0 allowed; sums to 1."""
    units: tuple[UnitPlan, ...] = ()
    """Units with their own settings; others follow the plan. `ModelProfile.unit_names` has the
    names at stage 3. If a unit has its own shares, each block is a separate unit."""
    transport: str | None = None
    """Transport, as `communicator` of `HeteroZeroOptimizer` names it. The planner stores the
    fastest one that was measured, so that later runs use it. None: chosen by the ranks' hosts."""
    prediction: Mapping[str, Any] | None = field(default=None, compare=False)
    """The planner's prediction, as JSON values; ignored by equality, hash and digest."""

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        freeze(self, "stage", _checked_stage(self.stage))
        freeze(self, "global_batch", _checked_count(self.global_batch, "global_batch", minimum=1))
        freeze(self, "micro_batches", _checked_micro_batches(self.micro_batches))
        freeze(self, "shares", _checked_shares(self.shares, "this plan"))
        freeze(self, "units", tuple(self.units))
        if self.transport is not None and not isinstance(self.transport, str):
            raise TypeError(f"transport must be a name or None, got {self.transport!r}")
        if self.prediction is not None:
            if not isinstance(self.prediction, Mapping):
                raise TypeError(
                    "prediction must be a mapping with JSON values, or None, got "
                    f"{self.prediction!r}"
                )
            freeze(self, "prediction", dict(self.prediction))
        self._check_batches_and_ranks_agree()
        self._check_units()

    def _check_batches_and_ranks_agree(self) -> None:
        total = sum(map(sum, self.micro_batches))
        if total != self.global_batch:
            raise ValueError(
                f"the micro-batches sum to {total} samples, but global_batch is "
                f"{self.global_batch}; change one of them"
            )
        if len(self.shares) != self.world_size:
            raise ValueError(
                f"{len(self.shares)} shares for {self.world_size} ranks; give one share per rank, "
                "0 for a rank without state"
            )

    def _check_units(self) -> None:
        strategies = {STRATEGIES[self.stage]}
        names = set()
        for unit in self.units:
            if not isinstance(unit, UnitPlan):
                raise TypeError(f"Plan.units must hold UnitPlan values, got {unit!r}")
            if unit.name in names:
                raise ValueError(f"unit {unit.name!r} has two entries in Plan.units; keep one")
            if unit.shares is not None and len(unit.shares) != self.world_size:
                raise ValueError(
                    f"unit {unit.name!r} has {len(unit.shares)} shares for {self.world_size} "
                    "ranks; give one per rank"
                )
            names.add(unit.name)
            strategies.add(unit.strategy)
        counts = [len(passes) for passes in self.micro_batches]
        if strategies & _SYNCHRONIZING_EVERY_PASS and len(set(counts)) > 1:
            odd = next(rank for rank, count in enumerate(counts) if count != counts[0])
            raise ValueError(
                f"rank {odd} has {counts[odd]} passes and rank 0 has {counts[0]}, but at stage "
                f"{self.stage} ranks synchronize at every pass and need the same number; add "
                "passes of 0 samples in front"
            )

    @classmethod
    def even(cls, world_size: int, global_batch: int, micro_batch: int, stage: int) -> Plan:
        """Equal work for every rank, as DDP, FSDP and DeepSpeed do.

        Args:
            world_size: number of ranks.
            global_batch: samples per optimizer step; a remainder goes to the first ranks.
            micro_batch: most samples of one pass on one rank.
            stage: ZeRO stage, 0 to 3.

        Returns:
            A plan with equal shares and the fewest passes, the pass with the remainder first.
        """
        stage = _checked_stage(stage)
        world_size = _checked_count(world_size, "world_size", minimum=1)
        global_batch = _checked_count(global_batch, "global_batch", minimum=1)
        micro_batch = _checked_count(micro_batch, "micro_batch", minimum=1)
        samples = _core.apportion(global_batch, (1.0,) * world_size)
        passes = [_fewest_passes(count, micro_batch) for count in samples]
        if STRATEGIES[stage] in _SYNCHRONIZING_EVERY_PASS:
            synchronizations = max(map(len, passes))
            passes = [(0,) * (synchronizations - len(own)) + own for own in passes]
        return cls(
            stage=stage,
            global_batch=global_batch,
            micro_batches=tuple(passes),
            shares=_even_shares(world_size),
        )

    @classmethod
    def manual(
        cls,
        micro_batches: str | Sequence[int],
        *,
        stage: int,
        passes: int = 1,
        shares: Sequence[float] | None = None,
    ) -> Plan:
        """Explicit micro-batches per rank.

        Args:
            micro_batches: samples per pass of each rank, as `"2,2,2,15"` or a sequence; 0 for a
                rank without samples.
            stage: ZeRO stage, 0 to 3.
            passes: passes per optimizer step.
            shares: fraction of the sharded state of each rank; None: even.

        Returns:
            A plan whose global batch is `passes * sum(micro_batches)`.

        Raises:
            ValueError: text that is not a list of whole numbers, or an invalid plan.
        """
        stage = _checked_stage(stage)
        passes = _checked_count(passes, "passes", minimum=1)
        sizes = _parse_sizes(micro_batches) if isinstance(micro_batches, str) else micro_batches
        sizes = [
            _checked_count(size, f"the micro-batch of rank {rank}")
            for rank, size in enumerate(sizes)
        ]
        idle = (0,) * passes if STRATEGIES[stage] in _SYNCHRONIZING_EVERY_PASS else ()
        return cls(
            stage=stage,
            global_batch=passes * sum(sizes),
            micro_batches=tuple((size,) * passes if size else idle for size in sizes),
            shares=_even_shares(len(sizes)) if shares is None else tuple(shares),
        )

    @classmethod
    def proportional(
        cls,
        speeds: Sequence[float],
        global_batch: int,
        stage: int,
        max_micro_batch: int | Sequence[int],
        *,
        shares: Sequence[float] | None = None,
    ) -> Plan:
        """Samples in proportion to speed, so that all ranks finish together.

        Args:
            speeds: samples per second of each rank, or a multiple; 0: a rank without samples.
            global_batch: samples per optimizer step, over all ranks.
            stage: ZeRO stage, 0 to 3.
            max_micro_batch: most samples of one pass, for all ranks or per rank (0: a rank without
                samples).
            shares: fraction of the sharded state of each rank; None: even.

        Returns:
            Stages 0 and 1: each rank has the fewest passes, the one with the remainder first.
            Stages 2 and 3: all ranks have the same number of passes, and each rank spreads its
            samples evenly over them, smaller passes first.

        Raises:
            ValueError: speeds that are negative, not finite or all 0, or a wrong number of limits.
        """
        stage = _checked_stage(stage)
        global_batch = _checked_count(global_batch, "global_batch", minimum=1)
        limits = _checked_limits(max_micro_batch, len(speeds))
        samples = _core.apportion(global_batch, _checked_speeds(speeds, limits))
        if STRATEGIES[stage] in _SYNCHRONIZING_EVERY_PASS:
            synchronizations = max(
                -(-count // limit) for count, limit in zip(samples, limits, strict=True) if count
            )
            passes = [_spread(count, synchronizations) for count in samples]
        else:
            passes = [
                _fewest_passes(count, limit) for count, limit in zip(samples, limits, strict=True)
            ]
        return cls(
            stage=stage,
            global_batch=global_batch,
            micro_batches=tuple(passes),
            shares=_even_shares(len(samples)) if shares is None else tuple(shares),
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.micro_batches)

    def samples(self, rank: int) -> int:
        """Samples of `rank` in one global batch."""
        return sum(self.micro_batches[self._checked_rank(rank)])

    def passes(self, rank: int) -> int:
        """Passes of `rank` in one step, with those of 0 samples."""
        return len(self.micro_batches[self._checked_rank(rank)])

    def offset(self, rank: int) -> int:
        """Position of the first sample of `rank` in a global batch."""
        return sum(map(sum, self.micro_batches[: self._checked_rank(rank)]))

    def cut(self, samples: int) -> tuple[int, ...]:
        """Samples per rank of a global batch that may be short, as the last one of an epoch.

        Args:
            samples: samples in this global batch, at most `global_batch`.

        Returns:
            The plan's samples for a whole batch. Otherwise the same proportions, with at least 1
            and at most the planned samples for every rank that has samples in the plan.

        Raises:
            ValueError: more samples than the global batch, or fewer than ranks with samples.
        """
        samples = _checked_count(samples, "samples")
        planned = [sum(passes) for passes in self.micro_batches]
        if samples == self.global_batch:
            return tuple(planned)
        working = sum(count > 0 for count in planned)
        if samples > self.global_batch:
            raise ValueError(
                f"a global batch of {samples} samples, but the plan's is {self.global_batch}; "
                "create a plan for the larger batch"
            )
        if samples < working:
            raise ValueError(
                f"a short global batch of {samples} samples cannot give one to each of the "
                f"{working} ranks that have samples in the plan; pass drop_last=True, or use a "
                "plan with fewer working ranks"
            )
        # A rank whose quota rounds to 0 gets 1, and the others divide the rest. Their mean quota
        # stays at least 1, so not all of them round to 0 and the loop ends.
        at_least_one: set[int] = set()
        while True:
            weights = [0 if rank in at_least_one else count for rank, count in enumerate(planned)]
            counts = _core.apportion(samples - len(at_least_one), weights)
            empty = {rank for rank, weight in enumerate(weights) if weight and not counts[rank]}
            if not empty:
                return tuple(
                    1 if rank in at_least_one else count for rank, count in enumerate(counts)
                )
            at_least_one |= empty

    def micro_batch_sizes(self, rank: int, samples: int) -> tuple[int, ...]:
        """Samples of each pass of `rank` when it has `samples` in total.

        Args:
            rank: the rank.
            samples: at most the planned samples of this rank; fewer in a short global batch.

        Returns:
            One size per planned pass, at most the planned one. Passes are filled in order, so the
            last ones may be 0.

        Raises:
            ValueError: more samples than the plan gives this rank.
        """
        planned = self.micro_batches[self._checked_rank(rank)]
        samples = _checked_count(samples, "samples")
        if samples > sum(planned):
            raise ValueError(
                f"rank {rank}: a batch of {samples} samples, but the plan gives this rank "
                f"{sum(planned)}; build the loader with HeteroBatchSampler(len(dataset), plan)"
            )
        sizes = []
        for size in planned:
            sizes.append(min(size, samples))
            samples -= sizes[-1]
        return tuple(sizes)

    def digest(self) -> str:
        """SHA-256 of everything but the prediction, as hex."""
        content = self.to_dict()
        del content["prediction"]
        return hashlib.sha256(
            json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """This plan as JSON types, for `from_dict`."""
        return {
            "version": _SCHEMA_VERSION,
            "stage": self.stage,
            "global_batch": self.global_batch,
            "micro_batches": [list(passes) for passes in self.micro_batches],
            "shares": list(self.shares),
            "units": [_unit_to_dict(unit) for unit in self.units],
            "transport": self.transport,
            "prediction": None if self.prediction is None else dict(self.prediction),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote.

        Raises:
            ValueError: another schema version, unknown or missing fields, or invalid values.
        """
        if not isinstance(content, Mapping):
            raise ValueError(f"a plan must be a JSON object, got {type(content).__name__}")
        if "version" not in content:
            raise ValueError("no field 'version'; expected a plan that Plan.to_json wrote")
        if content["version"] != _SCHEMA_VERSION:
            raise ValueError(
                f"plan format {content['version']!r}, but this version of Poplar reads format "
                f"{_SCHEMA_VERSION}; write the plan again with this version"
            )
        fields = {key: value for key, value in content.items() if key != "version"}
        _check_fields(
            fields,
            required={"stage", "global_batch", "micro_batches", "shares"},
            optional={"units", "transport", "prediction"},
            what="plan",
        )
        units = fields.get("units", [])
        if not isinstance(units, list):
            raise ValueError(f"units must be a list of units, got {units!r}")
        try:
            fields["units"] = tuple(_unit_from_dict(unit) for unit in units)
            return cls(**fields)
        except TypeError as error:
            raise ValueError(str(error)) from error

    def to_json(self, path: str | Path) -> None:
        """Write this plan to a file that `from_json` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> Plan:
        """Read a plan that `to_json` wrote.

        Raises:
            ValueError: the file is not JSON or not a plan.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both
            raise ValueError(
                f"{path} is not valid JSON ({error}); write it again with Plan.to_json"
            ) from error
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def __str__(self) -> str:
        ranks = "rank" if self.world_size == 1 else "ranks"
        strategy = STRATEGIES[self.stage].replace("_", " ")
        prediction = self.prediction or {}
        lines = [
            f"stage {self.stage} ({strategy}), global batch {self.global_batch}, {self.world_size} "
            f"{ranks}",
            *plan_table.lines(
                [
                    *plan_table.devices(prediction, self.world_size),
                    *plan_table.planned(self.micro_batches, self.shares),
                    *plan_table.predicted(prediction, self.world_size),
                ]
            ),
        ]
        if self.transport:
            lines.append(f"transport {self.transport}")
        persistent = sum(unit.keep_gathered for unit in self.units)
        if persistent:
            units = "unit" if persistent == 1 else "units"
            lines.append(f"{persistent} persistent {units}")
        if persistent < len(self.units):
            lines.append(f"units with their own settings: {len(self.units) - persistent}")
        return "\n".join([*lines, *plan_table.summary(prediction)])

    def _checked_rank(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: this plan has ranks 0 to {self.world_size - 1}")
        return rank


def _fewest_passes(samples: int, most: int) -> tuple[int, ...]:
    """Cut `samples` into the fewest passes of at most `most`, the remainder first."""
    if samples == 0:
        return ()
    full, remainder = divmod(samples, most)
    return ((remainder,) if remainder else ()) + (most,) * full


def _spread(samples: int, passes: int) -> tuple[int, ...]:
    """Cut `samples` into `passes` sizes that differ by at most 1, smaller ones first."""
    size, larger = divmod(samples, passes)
    return (size,) * (passes - larger) + (size + 1,) * larger


def _even_shares(world_size: int) -> tuple[float, ...]:
    return (1.0 / world_size,) * world_size if world_size else ()


def _parse_sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ValueError(
            f"expected one whole number per rank, as in '2,2,2,15', got {text!r}"
        ) from None


def _checked_count(value: Any, what: str, minimum: int = 0) -> int:
    """`value` as an int; bools and floats are errors."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be a whole number, got {value!r}") from None
    if count < minimum:
        raise ValueError(f"{what} must be at least {minimum}, got {count}")
    return count


def _checked_stage(stage: Any) -> int:
    number = _checked_count(stage, "stage")
    if number >= len(STRATEGIES):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {number}")
    return number


def _checked_micro_batches(micro_batches: Any) -> tuple[tuple[int, ...], ...]:
    try:
        per_rank = [tuple(passes) for passes in micro_batches]
    except TypeError:
        raise TypeError(
            f"micro_batches must hold one tuple of passes per rank, as in ((3, 3), (2, 2)), got "
            f"{micro_batches!r}"
        ) from None
    if not per_rank:
        raise ValueError("micro_batches is empty: a plan needs at least one rank")
    if set(map(type, chain(*per_rank))) <= {int} and min(chain(*per_rank), default=0) >= 0:
        return tuple(per_rank)  # fast path for thousands of ranks
    return tuple(
        tuple(
            _checked_count(size, f"rank {rank}: the micro-batch of pass {number}")
            for number, size in enumerate(passes)
        )
        for rank, passes in enumerate(per_rank)
    )


def _checked_shares(shares: Any, whose: str) -> tuple[float, ...]:
    try:
        # + 0.0 turns -0.0 into 0.0: equal plans must have equal digests.
        checked = tuple(float(share) + 0.0 for share in shares)
    except (TypeError, ValueError):
        raise TypeError(
            f"the shares of {whose} must be one number per rank, got {shares!r}"
        ) from None
    refused = [rank for rank, share in enumerate(checked) if not 0.0 <= share < math.inf]
    if refused:
        raise ValueError(
            f"rank {refused[0]}: the share of {whose} must be finite and 0 or more, got "
            f"{checked[refused[0]]}"
        )
    if abs(math.fsum(checked) - 1) > _SHARE_TOLERANCE:
        raise ValueError(
            f"the shares of {whose} must sum to 1, got {math.fsum(checked):.9g}; divide each by "
            "their sum"
        )
    return checked


def _checked_speeds(speeds: Sequence[float], limits: Sequence[int]) -> list[float]:
    """The weight of each rank: its speed, or 0 if its limit is 0."""
    for rank, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed >= 0):
            raise ValueError(f"rank {rank}: a speed must be finite and 0 or more, got {speed}")
    weights = [float(speed) if limit else 0.0 for speed, limit in zip(speeds, limits, strict=True)]
    if not any(weights):
        raise ValueError(
            f"no rank can take a sample: speeds {list(speeds)}, max_micro_batch {list(limits)}; at "
            "least one rank needs both above 0"
        )
    return weights


def _checked_limits(max_micro_batch: int | Sequence[int], world_size: int) -> list[int]:
    if isinstance(max_micro_batch, Sequence):
        limits = [
            _checked_count(limit, f"rank {rank}: max_micro_batch")
            for rank, limit in enumerate(max_micro_batch)
        ]
    else:
        limits = [_checked_count(max_micro_batch, "max_micro_batch", minimum=1)] * world_size
    if len(limits) != world_size:
        raise ValueError(
            f"{len(limits)} values of max_micro_batch for {world_size} speeds; give one number, or "
            "one per rank"
        )
    return limits


def _check_fields(
    fields: Mapping[str, Any], *, required: set[str], optional: set[str], what: str
) -> None:
    missing = sorted(required - fields.keys())
    unknown = sorted(fields.keys() - required - optional)
    if missing or unknown:
        problems = [f"missing {missing}"] * bool(missing) + [f"unknown {unknown}"] * bool(unknown)
        raise ValueError(
            f"the fields of this {what} do not match format {_SCHEMA_VERSION}: "
            f"{', '.join(problems)}; expected {sorted(required)}, optional {sorted(optional)}"
        )


def _unit_to_dict(unit: UnitPlan) -> dict[str, Any]:
    return {
        **dataclasses.asdict(unit),
        "shares": None if unit.shares is None else list(unit.shares),
    }


def _unit_from_dict(content: Any) -> UnitPlan:
    if not isinstance(content, Mapping):
        raise ValueError(f"a unit of a plan must be a JSON object, got {content!r}")
    _check_fields(
        content,
        required={"name", "strategy"},
        optional={"shares", "keep_gathered", "transport"},
        what="unit",
    )
    return UnitPlan(**content)

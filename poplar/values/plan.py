"""Plans: each rank's micro-batches and its share of the training state.

A `Plan` is frozen, hashable and checked on creation: its micro-batches sum to the global batch, its
shares to 1, and at stages 2 and 3 all ranks have the same number of passes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, TypeVar

from poplar import _core
from poplar.values import plan_table
from poplar.values.communication import EXACT, Communication
from poplar.values.formatting import format_layers, format_ranks
from poplar.values.schema import (
    ALL_DIFFERENT,
    Count,
    Document,
    Fraction,
    NonNegative,
    PositiveCount,
    Rule,
    check_fields,
    checked,
)

T = TypeVar("T")

STRATEGIES = ("replicated", "sharded_optimizer", "sharded_gradients", "sharded_parameters")
"""What is sharded, by stage: nothing, + optimizer state, + gradients, + parameters."""
ALL_STAGES = tuple(range(len(STRATEGIES)))

FIRST_STAGE_SYNCHRONIZING_EVERY_PASS = 2
"""The first stage at which ranks synchronize at every pass, not once per step."""
FIRST_STAGE_SHARDING_PARAMETERS = 3
"""The first stage at which parameters are sharded."""

Stage = Annotated[int, Rule("0, 1, 2 or 3", lambda stage: 0 <= stage < len(STRATEGIES))]
_Shares = Annotated[
    tuple[NonNegative, ...],
    Rule(
        "numbers that sum to 1 (divide each by their sum)",
        lambda shares: abs(math.fsum(shares) - 1.0) <= 1e-6,
        lambda shares: f", which sum to {math.fsum(shares):.9g}",
    ),
]


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The settings of one unit: parameters that are unsharded and reduced together."""

    name: str
    _: KW_ONLY
    shares: _Shares | None = None
    """Fraction of this unit owned by each rank; None: the plan's shares."""
    persistent: bool = False
    """Stage 3 unshards the parameters once per step, in the first pass, instead of twice per
    pass. Costs their memory between passes."""
    recomputed_on: Annotated[tuple[Count, ...], ALL_DIFFERENT] = ()
    """Ranks that run this unit's forward again in the backward, so that its activations take no
    memory between the two (activation checkpointing). The gradient is the same."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "recomputed_on", tuple(sorted(self.recomputed_on)))


_PREDICTED: Mapping[str, Any] = {
    "step_seconds": NonNegative,
    "samples_per_second": Annotated[float, Rule("at least 0", lambda rate: rate >= 0.0)],
    "compute_seconds": tuple[NonNegative, ...],
    "optimizer_seconds": tuple[NonNegative, ...],
    "communication_seconds": NonNegative,
    "memory_bytes": tuple[NonNegative, ...],
    "memory_limit_bytes": tuple[NonNegative, ...],
    "busy_fraction": tuple[Fraction, ...],
    "bound": str,
    "optimality_gap": NonNegative | None,
    "devices": tuple[str, ...],
    "policy": str,
    "digest": str,
}
"""What programs read of `Plan.prediction`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Document):
    """How to run a training step on unequal ranks.

    Create one with `even`, `manual` or `proportional`, or directly:

        Plan(stage=2, global_batch=12, micro_batches=((1, 4), (1, 4), (0, 2)), shares=(0.5, 0.5, 0))
    """

    _noun = "plan"
    _version = 1
    _remedy = "write it again with Plan.to_json"

    stage: Stage
    """ZeRO stage: 0 replicated, 1 optimizer state sharded, 2 + gradients, 3 + parameters."""
    global_batch: PositiveCount
    """Samples per optimizer step, over all ranks."""
    micro_batches: Annotated[tuple[tuple[Count, ...], ...], Rule("one tuple per rank", bool)]
    """`micro_batches[r][s]`: samples of pass `s` on rank `r`, 0 allowed. At stages 0 and 1 ranks
    may have different numbers of passes; `()` is a rank without samples."""
    shares: _Shares
    """Fraction of every sharded buffer that each rank owns, 0 allowed; sums to 1."""
    units: tuple[UnitPlan, ...] = ()
    """Units with their own settings; others follow the plan. `ModelProfile.unit_names` has the
    names at stage 3. If a unit has its own shares, each block is a separate unit."""
    transport: str | None = None
    """Transport, as `communicator` of `HeteroZeroOptimizer` names it. The planner stores the one
    that was measured, so that later runs use it. None: chosen by the ranks' hosts."""
    factored: Annotated[tuple[str, ...], ALL_DIFFERENT] = ()
    """`nn.Linear` modules, as `named_modules()` lists them, whose weight gradients are sent as
    factors: the ranks exchange the inputs of the layer and the gradients of its outputs, and the
    owners multiply them. Sends fewer bytes where a step has few rows (samples or tokens)."""
    host_state: tuple[Fraction, ...] = ()
    """By rank, the part of its optimizer state (masters in fp32, and the state of the class) that
    it keeps in host memory, where the host's processor updates it. Saves device memory and takes
    time. Whole flat parameters are kept there: the first ones that have at least this part of the
    elements. Empty: no rank keeps any."""
    communication: Communication = EXACT
    """The precision in which gradients and parameters are sent."""
    left_out: Annotated[tuple[Count, ...], ALL_DIFFERENT] = ()
    """Ranks without samples, passes and shares, which take no part in any collective of a step. The
    other ranks are the active ones."""
    prediction: Mapping[str, Any] | None = field(default=None, compare=False)
    """The planner's prediction, as JSON values; ignored by equality, hash and digest. Its `digest`
    is that of the plan it was made for: a plan that differs, as one made by `replace` or an edited
    file, has no prediction."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, annotation in _PREDICTED.items():
            if self.prediction and name in self.prediction:
                checked(annotation, self.prediction[name], f"Plan.prediction.{name}")
        object.__setattr__(self, "factored", tuple(sorted(self.factored)))
        object.__setattr__(self, "left_out", tuple(sorted(self.left_out)))
        if not any(self.host_state):
            object.__setattr__(self, "host_state", ())
        elif len(self.host_state) != self.world_size:
            raise ValueError(
                f"host_state has {len(self.host_state)} parts for {self.world_size} ranks; give "
                "one per rank, 0 for a rank without state in host memory, or leave it empty"
            )
        total = sum(map(sum, self.micro_batches))
        if total != self.global_batch:
            raise ValueError(
                f"the micro-batches sum to {total} samples, but global_batch is "
                f"{self.global_batch}; change one of them"
            )
        shares = {"the plan": self.shares}
        for unit in self.units:
            if (owner := f"unit {unit.name!r}") in shares:
                raise ValueError(f"{owner} has two entries in Plan.units; keep one")
            shares[owner] = unit.shares or self.shares
        for owner, own in shares.items():
            if len(own) != self.world_size:
                raise ValueError(
                    f"{owner} has {len(own)} shares for {self.world_size} ranks; give one share "
                    "per rank, 0 for a rank without state"
                )
        for unit in self.units:
            if unit.persistent and self.stage < FIRST_STAGE_SHARDING_PARAMETERS:
                raise ValueError(
                    f"unit {unit.name!r} is persistent at stage {self.stage}, where all parameters "
                    "are; use it at stage 3 only"
                )
            if max(unit.recomputed_on, default=0) >= self.world_size:
                raise ValueError(
                    f"unit {unit.name!r} is recomputed on ranks {unit.recomputed_on}, but the plan "
                    f"has ranks 0 to {self.world_size - 1}"
                )
        self.communication.check(self.stage, host_state=bool(self.host_state))
        self._check_left_out(shares)
        self._check_passes()
        of_plan = (self.prediction or {}).get("digest")
        if of_plan is not None and of_plan != self.digest():
            object.__setattr__(self, "prediction", None)

    def _check_left_out(self, shares: Mapping[str, Sequence[float]]) -> None:
        """Check that ranks that are left out have nothing; `shares` by their owner's name."""
        if not self.active_ranks or max(self.left_out, default=0) >= self.world_size:
            raise ValueError(
                f"left_out has ranks {self.left_out}, but the plan has ranks 0 to "
                f"{self.world_size - 1}, of which at least one is active"
            )
        for rank in self.left_out:
            has = [f"a share of {owner}" for owner, own in shares.items() if own[rank]]
            has += [f"passes {self.micro_batches[rank]}"] if self.micro_batches[rank] else []
            has += ["state in host memory"] if self.part_on_host(rank) else []
            has += ["recomputed units"] if self.recomputed_units(rank) else []
            if has:
                raise ValueError(
                    f"rank {rank} is left out, but it has {', '.join(has)}; give it no passes and "
                    "no share, or remove it from left_out"
                )

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that are not left out."""
        left_out = set(self.left_out)
        return tuple(rank for rank in range(self.world_size) if rank not in left_out)

    def check_all_active(self, where: str) -> None:
        """Raise ValueError if ranks are left out, which `where` does not support."""
        if self.left_out:
            raise ValueError(
                f"{where} needs all ranks, but the plan leaves out {format_ranks(self.left_out)}; "
                "plan with leave_out='never', or start only the other ranks with "
                "plan.of_active_ranks()"
            )

    def by_rank(self, of_active: Sequence[T], of_left_out: T) -> tuple[T, ...]:
        """Values of all ranks: those of the active ones, and one for all that are left out."""
        return _spread_out(of_active, self.active_ranks, self.world_size, of_left_out)

    def of_active_ranks(self) -> Plan:
        """The plan of the active ranks alone, which are numbered from 0; without a prediction."""
        if not self.left_out:
            return self
        active = self.active_ranks
        return self._of_ranks(
            lambda values, _: tuple(values[rank] for rank in active), active.index, left_out=()
        )

    def beside(self, left_out: Sequence[int]) -> Plan:
        """The plan in which these ranks are left out beside those of this plan, which leaves out
        none: `of_active_ranks` of the result is this plan, without a prediction.
        """
        if not left_out:
            return self
        ranks = range(self.world_size + len(left_out))
        active = sorted(set(ranks).difference(left_out))

        return self._of_ranks(
            lambda values, missing: _spread_out(values, active, len(ranks), missing),
            active.__getitem__,
            left_out=tuple(left_out),
        )

    def _of_ranks(
        self,
        values_of: Callable[[Sequence[Any], Any], tuple[Any, ...]],
        number_of: Callable[[int], int],
        left_out: tuple[int, ...],
    ) -> Plan:
        """The plan of other ranks, without a prediction.

        Args:
            values_of: their values, from those of the ranks of this plan and that of other ranks.
            number_of: the new number of a rank.
            left_out: of the other plan.
        """

        def of_unit(unit: UnitPlan) -> UnitPlan:
            shares = None if unit.shares is None else values_of(unit.shares, 0.0)
            return replace(
                unit, shares=shares, recomputed_on=tuple(map(number_of, unit.recomputed_on))
            )

        return replace(
            self,
            micro_batches=values_of(self.micro_batches, ()),
            shares=values_of(self.shares, 0.0),
            units=tuple(map(of_unit, self.units)),
            host_state=values_of(self.host_state, 0.0) if self.host_state else (),
            left_out=left_out,
            prediction=None,
        )

    @property
    def synchronizes_every_pass(self) -> bool:
        """Whether ranks wait for each other at every pass, not only once per step."""
        return self.stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS

    def _check_passes(self) -> None:
        if not self.synchronizes_every_pass:
            return
        first, *others = self.active_ranks
        passes = list(map(len, self.micro_batches))
        for rank in others:
            if passes[rank] != passes[first]:
                raise ValueError(
                    f"rank {rank} has {passes[rank]} passes and rank {first} has {passes[first]}, "
                    f"but at stage {self.stage} ranks synchronize at every pass and need the same "
                    "number; add passes of 0 samples in front"
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
        ranks = checked(PositiveCount, world_size, "world_size")
        global_batch = checked(PositiveCount, global_batch, "global_batch")
        micro_batch = checked(PositiveCount, micro_batch, "micro_batch")
        samples = _core.apportion(global_batch, [1.0] * ranks)
        return cls._from_passes(stage, [fewest_passes(count, micro_batch) for count in samples])

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
        passes = checked(PositiveCount, passes, "passes")
        sizes = _parse_sizes(micro_batches) if isinstance(micro_batches, str) else micro_batches
        sizes = checked(tuple[Count, ...], sizes, "micro_batches")
        return cls._from_passes(stage, [(size,) * passes if size else () for size in sizes], shares)

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
        stage = checked(Stage, stage, "stage")
        global_batch = checked(PositiveCount, global_batch, "global_batch")
        speeds = checked(tuple[NonNegative, ...], speeds, "speeds")
        is_per_rank = isinstance(max_micro_batch, Sequence)
        limits = max_micro_batch if is_per_rank else (max_micro_batch,) * len(speeds)
        limits = checked(tuple[Count, ...], limits, "max_micro_batch")
        if len(limits) != len(speeds):
            raise ValueError(
                f"{len(limits)} values of max_micro_batch for {len(speeds)} speeds; give one "
                "number, or one per rank"
            )
        weights = [speed if limit else 0.0 for speed, limit in zip(speeds, limits, strict=True)]
        if not any(weights):
            raise ValueError(
                f"no rank can take a sample: speeds {list(speeds)}, max_micro_batch "
                f"{list(limits)}; at least one rank needs both above 0"
            )
        samples = _core.apportion(global_batch, weights)
        passes = list(map(fewest_passes, samples, limits))
        if stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS:
            synchronizations = max(map(len, passes))
            passes = [spread(count, synchronizations) for count in samples]
        return cls._from_passes(stage, passes, shares)

    @classmethod
    def _from_passes(
        cls,
        stage: int,
        passes: Sequence[tuple[int, ...]],
        shares: Sequence[float] | None = None,
    ) -> Plan:
        """A plan with these passes; where their number must be equal, empty ones come first."""
        if checked(Stage, stage, "stage") >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS:
            synchronizations = max(map(len, passes), default=0)
            passes = [(0,) * (synchronizations - len(own)) + own for own in passes]
        return cls(
            stage=stage,
            global_batch=sum(map(sum, passes)),
            micro_batches=tuple(passes),
            shares=tuple([1.0 / len(passes) for _ in passes] if shares is None else shares),
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

    def recomputed_units(self, rank: int) -> tuple[str, ...]:
        """Names of the units whose forward `rank` runs again in the backward."""
        self._checked_rank(rank)
        return tuple(unit.name for unit in self.units if rank in unit.recomputed_on)

    def part_on_host(self, rank: int) -> float:
        """The part of its optimizer state that `rank` keeps in host memory."""
        self._checked_rank(rank)
        return self.host_state[rank] if self.host_state else 0.0

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
        samples = checked(Count, samples, "samples")
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
        counts = list(_core.apportion(samples, planned))
        for rank, count in enumerate(planned):
            if count and not counts[rank]:
                # There are enough samples for all working ranks, so the largest count is above 1.
                counts[counts.index(max(counts))] -= 1
                counts[rank] = 1
        return tuple(counts)

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
        samples = checked(Count, samples, "samples")
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

    def with_largest_batches(self, batches: Mapping[int, int]) -> Plan:
        """The same samples on every rank, in more passes where a micro-batch is too large.

        Args:
            batches: by rank, the most samples of one pass; other ranks have no limit.

        Returns:
            A plan without a prediction. Larger micro-batches are cut into the fewest parts of about
            equal size. Where all ranks synchronize at every pass, such a pass is cut into as many
            parts on all ranks, so that they still take about equally long.

        Raises:
            ValueError: a rank that the plan does not have, or a limit below 1.
        """
        limits = {
            self._checked_rank(rank): checked(PositiveCount, most, f"batches[{rank}]")
            for rank, most in batches.items()
        }
        parts = [
            [max(1, -(-size // limits.get(rank, max(1, size)))) for size in own]
            for rank, own in enumerate(self.micro_batches)
        ]
        if self.synchronizes_every_pass:
            most = [max(each) for each in zip(*filter(None, parts), strict=True)]
            parts = [most[: len(own)] for own in parts]
        micro_batches = []
        for own, counts in zip(self.micro_batches, parts, strict=True):
            cut = (spread(size, count) for size, count in zip(own, counts, strict=True))
            micro_batches.append(tuple(chain.from_iterable(cut)))
        return replace(self, micro_batches=tuple(micro_batches), prediction=None)

    def digest(self) -> str:
        """SHA-256 of everything but the prediction, as hex."""
        content = self.to_dict()
        del content["prediction"]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        ranks = "rank" if self.world_size == 1 else "ranks"
        strategy = STRATEGIES[self.stage].replace("_", " ")
        left_out = f", without {format_ranks(self.left_out)}" if self.left_out else ""
        lines = [
            f"stage {self.stage} ({strategy}), global batch {self.global_batch}, "
            f"{self.world_size} {ranks}{left_out}",
            *plan_table.lines(plan_table.plan_columns(self)),
        ]
        if self.transport:
            lines.append(f"transport {self.transport}")
        persistent = sum(unit.persistent for unit in self.units)
        if persistent:
            lines.append(f"{persistent} persistent unit{'s' if persistent > 1 else ''}")
        if self.factored:
            lines.append(f"gradients sent as factors: {format_layers(self.factored)}")
        if self.communication.compresses:
            lines.append(str(self.communication))
        others = sum(not (unit.persistent or unit.recomputed_on) for unit in self.units)
        if others:
            lines.append(f"units with their own settings: {others}")
        return "\n".join([*lines, *plan_table.summary(self.prediction or {})])

    def _checked_rank(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: this plan has ranks 0 to {self.world_size - 1}")
        return rank


def _spread_out(values: Sequence[T], ranks: Sequence[int], size: int, missing: T) -> tuple[T, ...]:
    """`size` values by rank: `values` on these ranks, and one on all others."""
    by_rank = dict(zip(ranks, values, strict=True))
    return tuple(by_rank.get(rank, missing) for rank in range(size))


def spread(samples: int, passes: int) -> tuple[int, ...]:
    """Cut `samples` into `passes` sizes that differ by at most 1, smaller ones first."""
    size, larger = divmod(samples, passes)
    return (size,) * (passes - larger) + (size + 1,) * larger


def fewest_passes(samples: int, most: int) -> tuple[int, ...]:
    """Cut `samples` into the fewest passes of at most `most`, the remainder first."""
    if samples == 0:
        return ()
    full, remainder = divmod(samples, most)
    return ((remainder,) if remainder else ()) + (most,) * full


def checked_stages(stages: Sequence[int]) -> list[int]:
    """The stages of an argument, each once, ascending; ValueError if it is no list of stages."""
    is_some = isinstance(stages, Collection) and not isinstance(stages, str) and len(stages) > 0
    if not is_some or any(isinstance(s, bool) or s not in ALL_STAGES for s in stages):
        raise ValueError(f"stages must be a non-empty subset of {ALL_STAGES}, got {stages!r}")
    return sorted({int(stage) for stage in stages})


def _parse_sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ValueError(
            f"expected one whole number per rank, as in '2,2,2,15', got {text!r}"
        ) from None

"""One line of `--output`: one configuration on one cluster. The dataclass is the schema."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path

import provenance

from head_to_head.outcome import Comparison, Outcome
from head_to_head.peers import UNEVEN_PEERS

LOSSES_COMPARED = 20
"""Number of first steps whose losses are compared."""
RESAMPLES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Speeds are samples per second; ratios of speeds are of medians unless they say otherwise.

    None: not measured, or nothing to compare with.
    """

    benchmark: str
    """`train`; other benchmarks may write to the same file."""
    run: str
    """Time at which the run began; rows of one run share it."""
    cluster: str
    """Its name: `2:1:1`."""
    described: str
    """The cluster in one sentence."""
    unequal: bool
    """Ranks differ in speed or memory."""
    configuration: str
    """Name of the configuration in tables."""
    provider: str
    """`poplar`, `deepspeed`, `fsdp2` or `ddp`."""
    stage: int
    """The equivalent ZeRO stage."""
    policy: str
    """Poplar: `exact`, `paper`, `flops` or `even`. Peers: `even`, or `uneven` with batches
    set manually in proportion to measured speeds."""
    over_gloo: bool
    """Poplar on gloo, as its peers, instead of shared memory."""
    model: str
    """`llama` or `encoder`."""
    size: str
    """Name of the model's size."""
    context: int
    """Bytes per sample."""
    global_batch: int
    """Samples per step over all ranks."""
    parameters: int
    """Trained parameters of the model."""
    ranks: list[int]
    """The cluster's ranks that take part, ascending."""
    micro_batches: list[list[int]]
    """Samples of each pass, by rank that takes part."""
    shares: list[float]
    """Shares of the sharded state, by rank that takes part; they sum to 1."""
    steps: int
    """Counted steps."""
    mean_speed: float | None
    """Over steps."""
    p20_speed: float | None
    """Over steps: one in five is slower."""
    p50_speed: float | None
    """Speed at the median step."""
    p80_speed: float | None
    """Over steps: one in five is faster."""
    p20_seconds: float | None
    """Step time."""
    p50_seconds: float | None
    """Step time."""
    p80_seconds: float | None
    """Step time."""
    tflops: float | None
    """10^12 operations per second of forward and backward, by torch's FLOP counter."""
    mfu: float | None
    """Fraction of the ranks' peak, measured in matrix products before the run."""
    sum_of_speeds: float
    """All ranks in plain passes at once, in turns with the configurations."""
    largest_sum_of_speeds: float
    """The same in one stretch: the larger value of before and after the run."""
    of_sum_of_speeds: float | None
    """Median over rounds of its speed over the plain passes of that round."""
    of_sum_in_step: float | None
    """The same for plain passes of its split with a barrier after each step: the bound that noise
    and whole samples leave. None where ranks are left out."""
    over: dict[str, float]
    """Speed over each peer's, of all stages."""
    best_peer_of_stage: str
    """The fastest peer with even batches at this stage; empty if there is none."""
    over_best_peer_of_stage: tuple[float, float, float] | None
    """The ratio and its 90 % interval, from `RESAMPLES` bootstrap samples of the rounds."""
    balance: float | None
    """Speed over `poplar even` at the same stage: the gain of the plan. Poplar's plans only."""
    transport: float | None
    """`poplar even` over `poplar even` on gloo at the same stage: the gain of shared memory;
    about 1 where ranks cannot share memory. Poplar's plans only."""
    engine: float | None
    """`poplar even` on gloo over the fastest peer of the stage. Poplar's plans only. The product of
    the three is the ratio to that peer."""
    ideal_over_even: float
    """The largest possible `balance` at this stage, by the calibrated speeds."""
    balance_of_ideal: float | None
    """`balance` over `ideal_over_even`; above 1 if waiting ranks free a shared core."""
    predicted_seconds: float | None
    """Step time predicted before the first step; Poplar's plans only."""
    prediction_error: float | None
    """Predicted over measured step time, minus 1."""
    peak_memory: list[int]
    """Bytes above what the process held before the engine was built, by rank."""
    last_loss: float | None
    """Mean loss of the global batch at the last step."""
    loss_difference: float | None
    """Largest difference over the first 20 steps from the loss of `poplar even` at stage 0 (else of
    the first configuration with a result); infinite where either is NaN."""
    drift: float
    """Largest relative change of a rank's calibrated speed during the run."""
    calibrated_speeds: list[float]
    """Speed of each of the cluster's ranks in plain passes."""
    absent: str
    """Why there is no result; empty if there is one."""
    notes: list[str]
    """Conditions that affect the results of the run."""
    device: str
    """The machine's processor and number of cores."""
    versions: str
    """Versions of torch, DeepSpeed and Python."""
    commit: str
    """Commit of this repository; `-dirty` if files differ from it."""
    day: str
    """YYYY-MM-DD."""

    @property
    def comparison(self) -> tuple[str, str, str, int, int]:
        """Key that comparable rows share."""
        return self.cluster, self.model, self.size, self.context, self.global_batch

    @property
    def takes_all_ranks(self) -> bool:
        """Uses all ranks of the cluster."""
        return len(self.ranks) == len(self.calibrated_speeds)

    @property
    def is_plan(self) -> bool:
        """A plan of Poplar for all ranks, on the transport that Poplar chose."""
        return self.provider == "poplar" and self.takes_all_ranks and not self.over_gloo

    @property
    def is_peer(self) -> bool:
        """Another engine in its usual form, with even batches."""
        return self.provider != "poplar" and self.policy == "even"

    @property
    def over_uneven(self) -> float | None:
        """Speed over the faster of the peers with uneven batches set manually at this stage."""
        ratios = [
            self.over[name]
            for name, (_, stage) in UNEVEN_PEERS.items()
            if stage == self.stage and name in self.over
        ]
        return min(ratios, default=None)


def rows_of(comparison: Comparison) -> list[Row]:
    """One row per configuration, absent ones included."""
    return [_row(comparison, outcome) for outcome in comparison.outcomes]


def read_rows(path: Path) -> list[Row]:
    """Rows that `write_rows` wrote; of a comparison that was run twice, the later run.

    Raises:
        ValueError: a row of another version of this benchmark; the message names the line.
    """
    found: dict[tuple[str, str, str, int, int], list[Row]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        values = json.loads(line) if line.strip() else {}
        if values.get("benchmark") != "train":
            continue
        differing = values.keys() ^ {field.name for field in fields(Row)}
        if differing:
            raise ValueError(
                f"{path}, line {number}: {', '.join(sorted(differing))} missing or "
                "unexpected: another version of train.py wrote this line; remove it or run again"
            )
        interval = values["over_best_peer_of_stage"]
        values["over_best_peer_of_stage"] = None if interval is None else tuple(interval)
        row = Row(**values)
        own = found.setdefault(row.comparison, [])
        if own and own[0].run != row.run:
            own.clear()
        own.append(row)
    return [row for own in found.values() for row in own]


def comparisons_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Comparable rows, by the cluster's name and, if needed, what distinguishes two of them."""
    comparisons: dict[tuple[str, str, str, int, int], list[Row]] = {}
    for row in rows:
        comparisons.setdefault(row.comparison, []).append(row)
    clusters = [cluster for cluster, *_ in comparisons]
    return {
        cluster
        if clusters.count(cluster) == 1
        else f"{cluster}, {model} {size}, {batch} samples of {context} bytes": own
        for (cluster, model, size, context, batch), own in comparisons.items()
    }


def _row(comparison: Comparison, outcome: Outcome) -> Row:
    configuration, ran = outcome.configuration, not outcome.absent
    if not ran:  # steps before the failure are no result
        outcome = replace(outcome, step_seconds=(), losses=(), peak_memory=())
    speeds = [configuration.plan.global_batch / seconds for seconds in outcome.step_seconds]
    median = outcome.samples_per_second if ran else None
    seconds = outcome.median_seconds if ran else None
    tflops = None if median is None else median * comparison.flops_per_sample / 1e12
    peak = sum(comparison.before.rank_flops[rank] for rank in configuration.ranks)
    peer = _best_peer(comparison, configuration.stage)
    predicted = outcome.predicted_seconds
    balance, transport, engine = _split(comparison, outcome, peer)
    ideal = comparison.ideal_over_even.get(configuration.stage, 1.0)
    return Row(
        benchmark="train",
        run=comparison.began,
        cluster=comparison.cluster,
        described=comparison.described,
        unequal=comparison.unequal,
        configuration=configuration.name,
        provider=configuration.provider,
        stage=configuration.stage,
        policy=configuration.policy,
        over_gloo=configuration.over_gloo,
        model=comparison.task.model,
        size=comparison.task.size,
        context=comparison.task.context,
        global_batch=comparison.task.global_batch,
        parameters=comparison.parameters,
        ranks=list(configuration.ranks),
        micro_batches=[list(sizes) for sizes in configuration.plan.micro_batches],
        shares=list(configuration.plan.shares),
        steps=len(speeds),
        mean_speed=configuration.plan.global_batch / statistics.mean(outcome.step_seconds)
        if ran
        else None,
        p20_speed=_quantile(speeds, 0),
        p50_speed=median,
        p80_speed=_quantile(speeds, 3),
        p20_seconds=_quantile(outcome.step_seconds, 0),
        p50_seconds=seconds,
        p80_seconds=_quantile(outcome.step_seconds, 3),
        tflops=tflops,
        mfu=None if tflops is None else 1e12 * tflops / peak,
        sum_of_speeds=comparison.sum_of_speeds,
        largest_sum_of_speeds=comparison.largest_sum_of_speeds,
        of_sum_of_speeds=comparison.of_sum_of_speeds(outcome) if ran else None,
        of_sum_in_step=comparison.of_sum_in_step(outcome) if ran else None,
        over={
            other.configuration.name: median / other.samples_per_second
            for other in _peers(comparison)
            if median is not None and other.configuration.name != configuration.name
        },
        best_peer_of_stage=peer.configuration.name if peer else "",
        over_best_peer_of_stage=_interval(outcome, peer) if ran and peer else None,
        balance=balance,
        transport=transport,
        engine=engine,
        ideal_over_even=ideal,
        balance_of_ideal=None if balance is None else balance / ideal,
        predicted_seconds=predicted,
        prediction_error=None if predicted is None or seconds is None else predicted / seconds - 1,
        peak_memory=list(outcome.peak_memory),
        last_loss=outcome.losses[-1] if outcome.losses else None,
        loss_difference=_loss_difference(outcome, _reference(comparison)),
        drift=comparison.drift,
        calibrated_speeds=list(comparison.speeds),
        absent=outcome.absent,
        notes=list(comparison.notes),
        device=provenance.device(),
        versions=provenance.versions("torch", "deepspeed"),
        commit=provenance.commit(),
        day=date.today().isoformat(),
    )


def _peers(comparison: Comparison) -> list[Outcome]:
    return [o for o in comparison.outcomes if o.configuration.provider != "poplar" and not o.absent]


def _best_peer(comparison: Comparison, stage: int) -> Outcome | None:
    found = [
        outcome
        for outcome in _peers(comparison)
        if outcome.configuration.stage == stage and outcome.configuration.policy == "even"
    ]
    return min(found, key=lambda outcome: outcome.median_seconds, default=None)


def _split(
    comparison: Comparison, outcome: Outcome, peer: Outcome | None
) -> tuple[float | None, float | None, float | None]:
    """Balance, transport and engine of a plan of Poplar; None for other configurations."""
    configuration = outcome.configuration
    all_ranks = len(configuration.ranks) == len(comparison.before.speeds)
    if (
        configuration.provider != "poplar"
        or not all_ranks
        or configuration.over_gloo
        or outcome.absent
    ):
        return None, None, None
    even = _even(comparison, configuration.stage)
    even_on_gloo = _even(comparison, configuration.stage, gloo=True)
    return _ratio(outcome, even), _ratio(even, even_on_gloo), _ratio(even_on_gloo, peer)


def _reference(comparison: Comparison) -> Outcome | None:
    """The outcome with the reference losses."""
    present = (outcome for outcome in comparison.outcomes if not outcome.absent)
    return _even(comparison, 0) or next(present, None)


def _even(comparison: Comparison, stage: int, *, gloo: bool = False) -> Outcome | None:
    """Poplar's even plan at a stage; `gloo`: on the transport of the peers."""
    for outcome in comparison.outcomes:
        configuration = outcome.configuration
        all_ranks = len(configuration.ranks) == len(comparison.before.speeds)
        same = (configuration.provider, configuration.policy, configuration.stage) == (
            "poplar",
            "even",
            stage,
        )
        if same and all_ranks and configuration.over_gloo == gloo and not outcome.absent:
            return outcome
    return None


def _ratio(one: Outcome | None, other: Outcome | None) -> float | None:
    """How much faster `one` is."""
    if one is None or other is None or one.absent or other.absent:
        return None
    return other.median_seconds / one.median_seconds


def _interval(one: Outcome, other: Outcome) -> tuple[float, float, float]:
    draw = random.Random(0)

    rounds = list(zip(one.turns, other.turns, strict=False))  # those with both

    def ratio() -> float:
        drawn = draw.choices(rounds, k=len(rounds))
        first = statistics.median(seconds for turn, _ in drawn for seconds in turn)
        second = statistics.median(seconds for _, turn in drawn for seconds in turn)
        return second / first

    ratios = sorted(ratio() for _ in range(RESAMPLES))
    ends = ratios[int(0.05 * RESAMPLES)], ratios[int(0.95 * RESAMPLES)]
    return (other.median_seconds / one.median_seconds, *ends)


def _loss_difference(outcome: Outcome, reference: Outcome | None) -> float | None:
    expected = reference.losses if reference else ()
    pairs = list(zip(outcome.losses, expected, strict=False))[:LOSSES_COMPARED]
    differences = [abs(loss - other) for loss, other in pairs]
    # max() would ignore NaN.
    return max((math.inf if math.isnan(d) else d for d in differences), default=None)


def _quantile(values: Sequence[float], fifth: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=5)[fifth]

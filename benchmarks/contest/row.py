"""One line of `--output`: what one entrant did on one cluster. The dataclass is the schema."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path

import provenance

from contest.outcome import Contest, Outcome
from contest.peers import UNEVEN_PEERS

LOSSES_COMPARED = 20
"""Steps from the beginning."""
RESAMPLES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Speeds are samples per second; ratios of speeds are of medians unless they say otherwise.

    What is None was not measured, or has nothing that it could be held against.
    """

    benchmark: str
    """`train`: other benchmarks may write to the same file."""
    run: str
    """When its contest was held: what one run measured, and nothing else, belongs together."""
    cluster: str
    """Its name: `2:1:1`."""
    described: str
    """How the cluster is made, in a sentence."""
    unequal: bool
    """Its ranks differ in speed or memory."""
    entrant: str
    """As tables show it."""
    provider: str
    """`poplar`, `deepspeed`, `fsdp2` or `ddp`."""
    stage: int
    """The ZeRO stage that it is, whatever the provider calls it."""
    policy: str
    """Poplar: `exact`, `paper`, `flops` or `even`. Peers: `even`, or `uneven` with batches set by hand
    in proportion to measured speeds."""
    over_gloo: bool
    """Poplar, carried as its peers are, although the ranks could share memory."""
    model: str
    """`llama` or `encoder`."""
    size: str
    """Of the model, by name."""
    context: int
    """Bytes per sample."""
    global_batch: int
    """Samples per step, of all ranks."""
    parameters: int
    """Of the model, all of them trained."""
    ranks: list[int]
    """Of the cluster, those that take part, ascending."""
    micro_batches: list[list[int]]
    """Samples of each pass, by rank that takes part."""
    shares: list[float]
    """Of the sharded state, by rank that takes part; they sum to 1."""
    steps: int
    """That counted."""
    mean_speed: float | None
    """Over steps."""
    p20_speed: float | None
    """Over steps: one in five is slower."""
    p50_speed: float | None
    """At the median step."""
    p80_speed: float | None
    """Over steps: one in five is faster."""
    p20_seconds: float | None
    """Of a step."""
    p50_seconds: float | None
    """Of a step."""
    p80_seconds: float | None
    """Of a step."""
    tflops: float | None
    """10^12 operations per second, of forward and backward, as torch's counter counts them."""
    mfu: float | None
    """Part of the ranks' peak, as measured in matrix products before the run."""
    sum_of_speeds: float
    """Of all ranks in plain passes, all at once, which take turns with the entrants."""
    largest_sum_of_speeds: float
    """The same, ten seconds at a stretch: the larger of before and after the run."""
    of_sum_of_speeds: float | None
    """Median over rounds: samples per second in its turn over the plain passes of that round."""
    of_sum_in_step: float | None
    """The same of plain passes of its split with nothing between the steps but waiting: what noise
    and whole samples leave. The rest of the way is the engine's. None where ranks are left out."""
    over: dict[str, float]
    """This entrant's speed over each peer's, of all stages."""
    best_peer_of_stage: str
    """The fastest of the peers at this stage; empty if there is none."""
    over_best_peer_of_stage: tuple[float, float, float] | None
    """The ratio, and the ends of its 90 % interval: medians of both after rounds were drawn again
    with replacement, the same ones for both, `RESAMPLES` times."""
    balance: float | None
    """Over `poplar even` at the same stage: what the plan gains. Poplar's plans only."""
    transport: float | None
    """`poplar even` over `poplar even` on gloo, at the same stage: what shared memory gains; where
    ranks can't share memory, 1 but for noise. Poplar's plans only."""
    engine: float | None
    """`poplar even` on gloo, as the peers are, over the fastest peer of the stage. Poplar's plans
    only; the product of the three is the ratio to that peer."""
    ideal_over_even: float
    """What balance could be at best at this stage, by the calibrated speeds."""
    balance_of_ideal: float | None
    """`balance` over it. Under core sharing it may exceed 1: who waits lends its core."""
    predicted_seconds: float | None
    """Of a step, said before the first one ran; Poplar's plans only."""
    prediction_error: float | None
    """Predicted over measured, less 1."""
    peak_memory: list[int]
    """Bytes above what the process held before the engine was built, by rank."""
    last_loss: float | None
    """Of the global batch, at the last step."""
    loss_difference: float | None
    """Largest, over the first 20 steps, from the loss of `poplar even` at stage 0 (without it, of
    the first entrant that has a result); infinite where either is not a number."""
    drift: float
    """Largest relative change of a rank's calibrated speed during the run."""
    calibrated_speeds: list[float]
    """Of each of the cluster's ranks in plain passes; they add up to the sum."""
    absent: str
    """Why there is no result; empty if there is one."""
    notes: list[str]
    """What a reader has to know of the whole run: a drift, a stall."""
    device: str
    """The machine's processor and number of cores."""
    versions: str
    """Of torch, DeepSpeed and Python."""
    commit: str
    """Of this repository; `-dirty` if something was changed since."""
    day: str
    """YYYY-MM-DD."""

    @property
    def contest(self) -> tuple[str, str, str, int, int]:
        """What all rows that can be held against each other have in common."""
        return self.cluster, self.model, self.size, self.context, self.global_batch

    @property
    def takes_all_ranks(self) -> bool:
        """Not one of the baselines that leave ranks out."""
        return len(self.ranks) == len(self.calibrated_speeds)

    @property
    def is_plan(self) -> bool:
        """One of Poplar's plans for all ranks, on the transport that it chooses itself."""
        return self.provider == "poplar" and self.takes_all_ranks and not self.over_gloo

    @property
    def is_peer(self) -> bool:
        """Another engine in its usual form, with even batches."""
        return self.provider != "poplar" and self.policy == "even"

    @property
    def over_uneven(self) -> float | None:
        """Speed over the faster of the peers with uneven batches set by hand at this stage."""
        ratios = [
            self.over[name]
            for name, (_, stage) in UNEVEN_PEERS.items()
            if stage == self.stage and name in self.over
        ]
        return min(ratios, default=None)


def rows_of(contest: Contest) -> list[Row]:
    """One row per entrant, those that are absent included."""
    return [_row(contest, outcome) for outcome in contest.outcomes]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append, one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as output:
        output.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote; of a contest that was held twice the later run counts.

    Raises:
        ValueError: a row of another version of this benchmark; says which line.
    """
    found: dict[tuple[str, str, str, int, int], list[Row]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        values = json.loads(line) if line.strip() else {}
        if values.get("benchmark") != "train":
            continue
        differing = values.keys() ^ {field.name for field in fields(Row)}
        if differing:
            raise ValueError(
                f"{path}, line {number}: {', '.join(sorted(differing))} should be there or should "
                "not: another version of train.py wrote it; remove the line or measure again"
            )
        interval = values["over_best_peer_of_stage"]
        values["over_best_peer_of_stage"] = None if interval is None else tuple(interval)
        row = Row(**values)
        own = found.setdefault(row.contest, [])
        if own and own[0].run != row.run:
            own.clear()
        own.append(row)
    return [row for own in found.values() for row in own]


def contests_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that can be held against each other, by the cluster's name and what tells two apart."""
    contests: dict[tuple[str, str, str, int, int], list[Row]] = {}
    for row in rows:
        contests.setdefault(row.contest, []).append(row)
    clusters = [cluster for cluster, *_ in contests]
    return {
        cluster
        if clusters.count(cluster) == 1
        else f"{cluster}, {model} {size}, {batch} samples of {context} bytes": own
        for (cluster, model, size, context, batch), own in contests.items()
    }


def _row(contest: Contest, outcome: Outcome) -> Row:
    entrant, ran = outcome.entrant, not outcome.absent
    if not ran:  # what it did before it failed is no result
        outcome = replace(outcome, step_seconds=(), losses=(), peak_memory=())
    speeds = [entrant.plan.global_batch / seconds for seconds in outcome.step_seconds]
    median = outcome.samples_per_second if ran else None
    seconds = outcome.median_seconds if ran else None
    tflops = None if median is None else median * contest.flops_per_sample / 1e12
    peak = sum(contest.before.rank_flops[rank] for rank in entrant.ranks)
    peer = _best_peer(contest, entrant.stage)
    predicted = outcome.predicted_seconds
    balance, transport, engine = _split(contest, outcome, peer)
    ideal = contest.ideal_over_even.get(entrant.stage, 1.0)
    return Row(
        benchmark="train",
        run=contest.began,
        cluster=contest.cluster,
        described=contest.described,
        unequal=contest.unequal,
        entrant=entrant.name,
        provider=entrant.provider,
        stage=entrant.stage,
        policy=entrant.policy,
        over_gloo=entrant.over_gloo,
        model=contest.task.model,
        size=contest.task.size,
        context=contest.task.context,
        global_batch=contest.task.global_batch,
        parameters=contest.parameters,
        ranks=list(entrant.ranks),
        micro_batches=[list(sizes) for sizes in entrant.plan.micro_batches],
        shares=list(entrant.plan.shares),
        steps=len(speeds),
        mean_speed=entrant.plan.global_batch / statistics.mean(outcome.step_seconds)
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
        sum_of_speeds=contest.sum_of_speeds,
        largest_sum_of_speeds=contest.largest_sum_of_speeds,
        of_sum_of_speeds=contest.of_sum_of_speeds(outcome) if ran else None,
        of_sum_in_step=contest.of_sum_in_step(outcome) if ran else None,
        over={
            other.entrant.name: median / other.samples_per_second
            for other in _peers(contest)
            if median is not None and other.entrant.name != entrant.name
        },
        best_peer_of_stage=peer.entrant.name if peer else "",
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
        loss_difference=_loss_difference(outcome, _reference(contest)),
        drift=contest.drift,
        calibrated_speeds=list(contest.speeds),
        absent=outcome.absent,
        notes=list(contest.notes),
        device=provenance.device(),
        versions=provenance.versions("torch", "deepspeed"),
        commit=provenance.commit(),
        day=date.today().isoformat(),
    )


def _peers(contest: Contest) -> list[Outcome]:
    return [o for o in contest.outcomes if o.entrant.provider != "poplar" and not o.absent]


def _best_peer(contest: Contest, stage: int) -> Outcome | None:
    found = [
        outcome
        for outcome in _peers(contest)
        if outcome.entrant.stage == stage and outcome.entrant.policy == "even"
    ]
    return min(found, key=lambda outcome: outcome.median_seconds, default=None)


def _split(
    contest: Contest, outcome: Outcome, peer: Outcome | None
) -> tuple[float | None, float | None, float | None]:
    """Balance, transport and engine of one of Poplar's plans; nothing of anybody else's."""
    entrant = outcome.entrant
    everyone = len(entrant.ranks) == len(contest.before.speeds)
    if entrant.provider != "poplar" or not everyone or entrant.over_gloo or outcome.absent:
        return None, None, None
    even = _even(contest, entrant.stage)
    even_on_gloo = _even(contest, entrant.stage, gloo=True)
    return _ratio(outcome, even), _ratio(even, even_on_gloo), _ratio(even_on_gloo, peer)


def _reference(contest: Contest) -> Outcome | None:
    """Whose losses all others' are held against."""
    present = (outcome for outcome in contest.outcomes if not outcome.absent)
    return _even(contest, 0) or next(present, None)


def _even(contest: Contest, stage: int, *, gloo: bool = False) -> Outcome | None:
    """Poplar's even plan at a stage; `gloo`: carried as peers' tensors are."""
    for outcome in contest.outcomes:
        entrant = outcome.entrant
        everyone = len(entrant.ranks) == len(contest.before.speeds)
        same = (entrant.provider, entrant.policy, entrant.stage) == ("poplar", "even", stage)
        if same and everyone and entrant.over_gloo == gloo and not outcome.absent:
            return outcome
    return None


def _ratio(one: Outcome | None, other: Outcome | None) -> float | None:
    """How much faster `one` is."""
    if one is None or other is None or one.absent or other.absent:
        return None
    return other.median_seconds / one.median_seconds


def _interval(one: Outcome, other: Outcome) -> tuple[float, float, float]:
    draw = random.Random(0)

    rounds = list(zip(one.turns, other.turns, strict=False))  # those that both took part in

    def ratio() -> float:
        drawn = draw.choices(rounds, k=len(rounds))
        ours = statistics.median(seconds for turn, _ in drawn for seconds in turn)
        theirs = statistics.median(seconds for _, turn in drawn for seconds in turn)
        return theirs / ours

    ratios = sorted(ratio() for _ in range(RESAMPLES))
    ends = ratios[int(0.05 * RESAMPLES)], ratios[int(0.95 * RESAMPLES)]
    return (other.median_seconds / one.median_seconds, *ends)


def _loss_difference(outcome: Outcome, reference: Outcome | None) -> float | None:
    theirs = reference.losses if reference else ()
    pairs = list(zip(outcome.losses, theirs, strict=False))[:LOSSES_COMPARED]
    differences = [abs(ours - other) for ours, other in pairs]
    # NaN compares as neither larger nor smaller, and would be lost among the others.
    return max((math.inf if math.isnan(d) else d for d in differences), default=None)


def _quantile(values: Sequence[float], fifth: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=5)[fifth]

"""One line of `--output`: what one entrant did on one cluster. The dataclass is the schema."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from contest.engine import Entrant
from contest.outcome import Contest, Outcome

LOSSES_COMPARED = 20
"""Steps from the beginning."""
RESAMPLES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Speeds are samples per second; ratios of speeds are of medians unless they say otherwise."""

    benchmark: str
    cluster: str
    described: str
    unequal: bool
    entrant: str
    provider: str
    stage: int
    policy: str
    model: str
    size: str
    context: int
    global_batch: int
    parameters: int
    ranks: list[int]
    micro_batches: list[list[int]]
    shares: list[float]
    steps: int
    """That counted."""
    mean_speed: float | None
    p20_speed: float | None
    p50_speed: float | None
    p80_speed: float | None
    p20_seconds: float | None
    p50_seconds: float | None
    p80_seconds: float | None
    tflops: float | None
    """Of forward and backward, as torch's counter counts them."""
    mfu: float | None
    """Against the ranks' measured peak in matrix products."""
    sum_of_speeds: float
    of_sum_of_speeds: float | None
    over: dict[str, float]
    """This entrant's speed over each peer's."""
    best_peer_of_stage: str
    """The fastest of the peers at this stage; empty if there is none."""
    over_best_peer_of_stage: tuple[float, float, float] | None
    """The ratio, and the ends of its 90 % interval: medians of steps drawn again with replacement
    from both, `RESAMPLES` times."""
    balance: float | None
    """Over `poplar even` at the same stage: what the plan gains. Poplar's plans only."""
    transport: float | None
    """`poplar even` over `poplar even` on gloo, at the same stage: what shared memory gains."""
    engine: float | None
    """`poplar even` on gloo, as the peers are, over the fastest peer of the stage."""
    ideal_over_even: float
    """By the calibrated speeds."""
    balance_of_ideal: float | None
    predicted_seconds: float | None
    prediction_error: float | None
    """Predicted over measured, less 1."""
    peak_memory: list[int]
    """Bytes above what the process held before the engine was built, by rank."""
    last_loss: float | None
    loss_difference: float | None
    """Largest, over the first 20 steps, from the first entrant's loss."""
    drift: float
    """Largest relative change of a rank's calibrated speed during the run."""
    calibrated_speeds: list[float]
    absent: str
    """Why there is no result; empty if there is one."""
    device: str
    versions: str
    commit: str
    day: str

    @property
    def takes_all_ranks(self) -> bool:
        """Not one of the baselines that leave ranks out."""
        return len(self.ranks) == len(self.calibrated_speeds)

    @property
    def is_peer(self) -> bool:
        """Not Poplar."""
        return self.provider != "poplar"


def rows_of(contest: Contest) -> list[Row]:
    """One row per entrant, those that are absent included."""
    return [_row(contest, outcome) for outcome in contest.outcomes]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append, one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as output:
        output.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote; of an entrant that ran twice on a cluster the last row counts."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        interval = values["over_best_peer_of_stage"]
        values["over_best_peer_of_stage"] = None if interval is None else tuple(interval)
        row = Row(**values)
        found[row.cluster, row.model, row.entrant] = row
    return list(found.values())


def _row(contest: Contest, outcome: Outcome) -> Row:
    entrant, ran = outcome.entrant, not outcome.absent
    speeds = [entrant.plan.global_batch / seconds for seconds in outcome.step_seconds]
    median = outcome.samples_per_second if ran else None
    seconds = outcome.median_seconds if ran else None
    tflops = None if median is None else median * contest.flops_per_sample / 1e12
    peer = _best_peer(contest, entrant.stage)
    predicted = outcome.predicted_seconds
    balance = (
        _ratio(outcome, _even(contest, entrant.stage)) if _is_planned(contest, entrant) else None
    )
    ideal = contest.ideal_over_even.get(entrant.stage, 1.0)
    return Row(
        benchmark="train",
        cluster=contest.cluster,
        described=contest.described,
        unequal=contest.unequal,
        entrant=entrant.name,
        provider=entrant.provider,
        stage=entrant.stage,
        policy=entrant.policy,
        model=contest.task.model,
        size=contest.task.size,
        context=contest.task.context,
        global_batch=contest.task.global_batch,
        parameters=contest.parameters,
        ranks=list(entrant.ranks),
        micro_batches=[list(sizes) for sizes in entrant.plan.micro_batches],
        shares=list(entrant.plan.shares),
        steps=len(speeds),
        mean_speed=statistics.mean(speeds) if ran else None,
        p20_speed=_quantile(speeds, 0),
        p50_speed=median,
        p80_speed=_quantile(speeds, 3),
        p20_seconds=_quantile(outcome.step_seconds, 0),
        p50_seconds=seconds,
        p80_seconds=_quantile(outcome.step_seconds, 3),
        tflops=tflops,
        mfu=None if tflops is None else 1e12 * tflops / contest.before.peak_flops,
        sum_of_speeds=contest.sum_of_speeds,
        of_sum_of_speeds=None if median is None else median / contest.sum_of_speeds,
        over={
            other.entrant.name: median / other.samples_per_second
            for other in _peers(contest)
            if median is not None and other.entrant.name != entrant.name
        },
        best_peer_of_stage=peer.entrant.name if peer else "",
        over_best_peer_of_stage=_interval(outcome, peer) if ran and peer else None,
        balance=balance,
        transport=_ratio(_even(contest, entrant.stage), _even(contest, entrant.stage, gloo=True)),
        engine=_ratio(_even(contest, entrant.stage, gloo=True), peer),
        ideal_over_even=ideal,
        balance_of_ideal=None if balance is None else balance / ideal,
        predicted_seconds=predicted,
        prediction_error=None if predicted is None or seconds is None else predicted / seconds - 1,
        peak_memory=list(outcome.peak_memory),
        last_loss=outcome.losses[-1] if outcome.losses else None,
        loss_difference=_loss_difference(outcome, contest.outcomes[0]),
        drift=contest.drift,
        calibrated_speeds=[
            max(both) for both in zip(contest.before.speeds, contest.after.speeds, strict=True)
        ],
        absent=outcome.absent,
        device=f"{_processor()}, {os.cpu_count()} cores",
        versions=_versions(),
        commit=_commit(),
        day=date.today().isoformat(),
    )


def _peers(contest: Contest) -> list[Outcome]:
    return [o for o in contest.outcomes if o.entrant.provider != "poplar" and not o.absent]


def _best_peer(contest: Contest, stage: int) -> Outcome | None:
    found = [outcome for outcome in _peers(contest) if outcome.entrant.stage == stage]
    return min(found, key=lambda outcome: outcome.median_seconds, default=None)


def _is_planned(contest: Contest, entrant: Entrant) -> bool:
    """One of Poplar's plans for all ranks, on the transport it chooses itself."""
    everyone = len(entrant.ranks) == len(contest.before.speeds)
    return entrant.provider == "poplar" and everyone and not entrant.over_gloo


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

    def drawn(seconds: Sequence[float]) -> float:
        return statistics.median(draw.choices(seconds, k=len(seconds)))

    ratios = sorted(drawn(other.step_seconds) / drawn(one.step_seconds) for _ in range(RESAMPLES))
    ends = ratios[int(0.05 * RESAMPLES)], ratios[int(0.95 * RESAMPLES)]
    return (other.median_seconds / one.median_seconds, *ends)


def _loss_difference(outcome: Outcome, reference: Outcome) -> float | None:
    pairs = list(zip(outcome.losses, reference.losses, strict=False))[:LOSSES_COMPARED]
    return max((abs(ours - theirs) for ours, theirs in pairs), default=None)


def _quantile(values: Sequence[float], fifth: int) -> float | None:
    return statistics.quantiles(values, n=5)[fifth] if len(values) > 1 else None


def _versions() -> str:
    names = ("torch", "deepspeed")
    said = []
    for name in names:
        try:
            said.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            said.append(f"no {name}")
    return f"{', '.join(said)}, python {platform.python_version()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return found.stdout.strip() or "unknown"

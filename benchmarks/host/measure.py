"""Measures one case: collective calls and bytes of a step, and CPU seconds in turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rows import Row

from host.collective_count import CollectiveCount
from host.engines import Engine, fsdp2_engine, plain_engine, poplar_engine
from host.fake_ranks import fake_ranks
from host.modelled_bytes import bytes_sent
from host.scaled_model import Shape

WARMUP_STEPS = 4
"""Steps that are not counted: collective orders, allocations, lazy initialization."""
BYTES_TOLERANCE = 0.01
"""Between the scaled model's counted and modelled bytes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What both engines run."""

    shape: Shape
    ranks: int
    stage: int
    max_norm: float | None = None
    """Clip gradients to this norm; None: don't."""


def measure(case: Case, *, rounds: int, steps: int) -> Iterator[Row]:
    """Poplar's row and FSDP2's, after so many turns of so many steps of each.

    Raises:
        ValueError: the scaled model has other units than the full one, or Poplar does not send the
            bytes that the cost model expects.
    """
    with fake_ranks(case.ranks):
        ours = poplar_engine(case.shape, case.stage, case.max_norm)
        with ours.limits:
            theirs = fsdp2_engine(case.shape, case.stage, case.max_norm)
            engines = [ours, theirs, plain_engine(case.shape)]
            for engine in engines:
                for _ in range(WARMUP_STEPS):
                    engine.step()
            counts = [count_collectives(engine, case.ranks) for engine in (ours, theirs)]
            seconds = cpu_seconds(engines, rounds, steps)
    modelled = bytes_sent(ours.units, case.stage, case.ranks)
    check_bytes(counts[0].sent, modelled)
    modelled_full = bytes_sent(ours.full_units, case.stage, case.ranks)
    sent = {
        kind: round(counts[0].sent[kind] * modelled_full[kind] / modelled[kind])
        for kind in modelled
    }
    # What FSDP2 sends at full size is not known: its padding depends on widths.
    for engine, counted, own, sent_bytes in zip(
        (ours, theirs), counts, seconds[:2], (sent, None), strict=True
    ):
        ordered = sorted(own)
        p20, p50, p80 = (ordered[round(part * (len(ordered) - 1))] for part in (0.2, 0.5, 0.8))
        what = {
            "provider": engine.provider,
            "model": case.shape.name,
            # Of every width of the model.
            "divisor": case.shape.divisor,
            "layers": case.shape.config(full=True).layers,
            "ranks": case.ranks,
            "stage": case.stage,
            "max_norm": case.max_norm,
        }
        figures = {
            # Of a step, by operator of torch.distributed, the control channel included.
            "calls": dict(counted.calls),
            "total_calls": sum(counted.calls.values()),
            # By one rank in a step at full size.
            "sent_bytes": sent_bytes,
            "modelled_bytes": dict(modelled_full),
            # CPU seconds of a step, and of the forward and the backward without an engine.
            "p20_seconds": p20,
            "p50_seconds": p50,
            "p80_seconds": p80,
            "passes_seconds": statistics.median(seconds[2]),
            "steps": len(ordered),
        }
        yield Row.of("host_overhead", what, figures)


def count_collectives(engine: Engine, ranks: int) -> CollectiveCount:
    """The collectives of one step, those of the control channel included."""
    with CollectiveCount(ranks) as counted:
        engine.step()
    return counted


def cpu_seconds(engines: Sequence[Engine], rounds: int, steps: int) -> list[list[float]]:
    """CPU seconds of each engine's steps. The engines take turns."""
    seconds: list[list[float]] = [[] for _ in engines]
    gc.collect()
    gc.freeze()  # a collection would scan the objects of all engines in one engine's turn
    for _ in range(rounds):
        for engine, taken in zip(engines, seconds, strict=True):
            engine.step()  # the first after another engine's turn finds cold caches
            for _ in range(steps):
                began = time.process_time()
                engine.step()
                taken.append(time.process_time() - began)
    gc.unfreeze()
    return seconds


def check_bytes(sent: Counter[str], modelled: Counter[str]) -> None:
    """Raise unless Poplar sends what the cost model expects."""
    for kind, expected in modelled.items():
        if abs(sent[kind] - expected) > BYTES_TOLERANCE * expected:
            raise ValueError(
                f"Poplar sends {sent[kind]} bytes of {kind}s in a step, the cost model expects "
                f"{expected}"
            )

"""Measures how much of a reduction runs beside the passes of CPU ranks on several hosts.

What is on the way between hosts takes no processor time; packing, sockets and sums do. The overlap
of devices that compute while the host goes on is fitted to steps of the engine instead. The ranks
of one host communicate with the cores that compute, so they have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import median

from poplar.comm.shard_layout import ALIGNMENT, Layout
from poplar.profiler.collectives import IN_FLIGHT, find_hosts, sampled_collectives
from poplar.profiler.session import Session
from poplar.profiler.timing import repeats_in_a_sample, seconds_of
from poplar.profiler.trial_runs import take_turns
from poplar.values.profile import ClusterProfile

ROUNDS = 5
"""Of passes alone, reductions alone, and both, at most. One always runs."""
LEAST_PART = 0.1
"""Of a rank's shortest pass: if reducing the model takes less, no plan depends on the overlap, and
noise would hide it."""
_BYTES_EACH = 12
"""Bytes per element beside a pass: a gradient, its bucket, and what is received and added."""


def measure_overlap(session: Session, profile: ClusterProfile, budget: float) -> float:
    """`ClusterProfile.overlap`, in about `budget` seconds; 0 if it is not measured. Collective.

    Every rank runs passes for as long as a reduction takes. Compute runs at `overlap` of its speed
    beside it, so both together take `compute + (1 - overlap) * reduction`.

    Args:
        profile: curves of the ranks, and the time of a reduction of the model.
        budget: where it does not suffice for the model, fewer elements are reduced; at most as many
            as the engine has in flight.
    """
    whole, ranks = profile.network.reduce_scatter_seconds, session.group.size
    shortest = max(device.points[0].seconds for device in profile.devices)
    if session.asynchronous or len(find_hosts(session).members) == 1:
        return 0.0
    if not session.plain_passes_fit() or whole < LEAST_PART * shortest:
        return 0.0
    collectives, _ = sampled_collectives(session)
    at_once = IN_FLIGHT * max(collectives.numels) / sum(collectives.numels)
    part = min(1.0, budget / (3 * ROUNDS * whole), at_once)
    numels = [max(ALIGNMENT, int(part * n) // ALIGNMENT * ALIGNMENT) for n in collectives.numels]
    layouts = [Layout.from_shares(n, (1.0 / ranks,) * ranks) for n in numels]
    expected, rank = part * whole, session.group.rank
    room = session.memory.unsharded[rank] - _BYTES_EACH * sum(numels)
    points = profile.devices[rank].points
    small = (p for p in reversed(points) if p.seconds <= expected and p.activation_bytes <= room)
    point = next(small, points[0])
    repeats, passes = repeats_in_a_sample(max(expected, shortest)), session.passes()

    def compute() -> None:
        for _ in range(math.ceil(expected / point.seconds)):
            passes.run(point.batch)

    def reduce(meanwhile: Callable[[], None] = lambda: None) -> None:
        issued = [collectives.reduce_scatter(layout) for layout in layouts]
        meanwhile()
        for work in issued:
            work.wait()

    def seconds(run: Callable[[], None]) -> float:
        session.exchange(None)
        return max(session.exchange(seconds_of(run, session.device, repeats)))

    def overlap() -> float:
        computing, reducing = seconds(compute), seconds(reduce)
        both = seconds(partial(reduce, compute))
        return (computing + reducing - both) / min(computing, reducing)

    with session.as_in_training():
        session.on_all_ranks(compute, "a pass beside reductions")
        turns = take_turns(ROUNDS, budget, session.from_first_rank)
        overlaps = [overlap() for _ in turns]
    return min(1.0, max(0.0, median(overlaps)))

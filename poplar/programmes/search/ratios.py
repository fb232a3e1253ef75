"""The best ratios for a programme: a linear programme over the ranks' parts, then whole samples.

Every term of a step is a maximum of lines in the ranks' parts, with all dimensions cut alike and
compute on the line through the measured pass at the present ratios. An all-to-all sends `x (1 - x)`
of a tensor, of which the tangent is used. Memory grows with a rank's part, so its row is an upper
bound on the part. The solution is rounded to samples, and samples are moved between pairs of ranks
as long as the prediction, with the actual cuts, falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from poplar.planner.shard_allocation import Row, equal, minimize
from poplar.programmes.search.step_model import StepModel
from poplar.programmes.search.step_terms import EVEN, WHOLE, StepTerms

_MAX_ROUNDS = 24
_SMALLEST_GAIN = 1e-9


def best_ratios(
    model: StepModel, terms: StepTerms, ratios: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Samples per rank with the fewest predicted seconds for a programme; None: none fit.

    Args:
        model: of the step.
        terms: of the programme.
        ratios: present ones, where lines are tangents.
    """
    most = [_most_samples(model, terms, rank) for rank in range(len(ratios))]
    if min(most) < 0 or sum(most) < model.global_batch:
        return None
    candidates = [model.samples(ratios)]
    parts = _best_parts(model, terms, ratios, most)
    if parts is not None:
        candidates.append(_rounded(parts, most, model.global_batch))
    fitting = [c for c in candidates if sum(c) == model.global_batch and model.fits(terms, c)]
    if not fitting:
        return None
    return _improved(model, terms, min(fitting, key=lambda c: model.step(terms, c).total))


def _most_samples(model: StepModel, terms: StepTerms, rank: int) -> int:
    """The most samples with which a rank's memory suffices; -1: not even none."""
    total, ranks = model.global_batch, model.cluster.world_size

    def fits(samples: int) -> bool:
        others = total - samples
        ratios = [others] * ranks if ranks > 1 else [total]
        ratios[rank] = samples * max(1, ranks - 1)
        needed = model.memory_bytes(terms, tuple(ratios), rank)
        return needed <= model.memory_limit(rank)

    low, high = -1, min(total, model.cluster.devices[rank].max_batch)
    if ranks == 1:
        return high if fits(total) else -1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _best_parts(
    model: StepModel, terms: StepTerms, ratios: tuple[int, ...], most: Sequence[int]
) -> list[float] | None:
    ranks = len(ratios)
    first = ranks  # of five terms
    unit = max(model.step(terms, ratios).total, 1e-9)
    if not math.isfinite(unit):
        unit = 1.0

    def rows() -> Iterator[Row]:
        yield from equal(1.0, dict.fromkeys(range(ranks), 1.0))
        for rank in range(ranks):
            yield most[rank] / model.global_batch, {rank: 1.0}
        for rank, variable, constant, slope in _lines(model, terms, ratios):
            row = {rank: slope / unit, first + variable: -1.0}
            yield -constant / unit, row

    costs = [0.0] * ranks + [1.0] * 5
    solved = minimize(costs, list(rows()))
    return None if solved is None else solved[1][:ranks]


def _lines(
    model: StepModel, terms: StepTerms, ratios: tuple[int, ...]
) -> Iterator[tuple[int, int, float, float]]:
    """Rank, number of the term, and its seconds as a line in the rank's part."""
    ranks = len(ratios)
    seconds = model.rank_seconds(ratios)
    divided = sum(w for units, w in terms.work.items() if units != WHOLE) / model.work
    moved = {"gather": 0.0, "reduce": 0.0, "exchange": 0.0}
    for transfer, nbytes in terms.transfers.items():
        if transfer.units != (EVEN,):
            moved[transfer.kind] += nbytes
    links, others = model.links, ranks - 1
    replicated = terms.replicated_fraction
    for rank in range(ranks):
        if math.isfinite(seconds.whole[rank]):
            yield rank, 0, divided * seconds.fixed[rank], divided * seconds.whole[rank]
        send, receive = links.moving.send[rank], links.moving.receive[rank]
        yield rank, 1, 0.0, moved["gather"] * others * send
        yield rank, 1, moved["gather"] * receive, -moved["gather"] * receive
        send, receive = links.reducing.send[rank], links.reducing.receive[rank]
        yield rank, 2, moved["reduce"] * send, -moved["reduce"] * send
        yield rank, 2, 0.0, moved["reduce"] * others * receive
        here = ratios[rank] / sum(ratios)
        rate = moved["exchange"] * max(links.moving.send[rank], links.moving.receive[rank])
        yield rank, 3, rate * here * here, rate * (1.0 - 2.0 * here)
        start = model.stage.optimizer_seconds(rank, replicated * model.shares[rank])
        slope = model.stage.optimizer_seconds(rank, 1.0) - model.stage.optimizer_seconds(rank, 0.0)
        yield rank, 4, start, (1.0 - replicated) * slope


def _rounded(parts: Sequence[float], most: Sequence[int], total: int) -> tuple[int, ...]:
    """Whole samples within the bounds, by largest remainder."""
    exact = [part * total for part in parts]
    samples = [
        min(bound, math.floor(value + 1e-9)) for value, bound in zip(exact, most, strict=True)
    ]
    while (missing := total - sum(samples)) > 0:
        room = [rank for rank, own in enumerate(samples) if own < most[rank]]
        if not room:
            break
        for rank in sorted(room, key=lambda rank: samples[rank] - exact[rank])[:missing]:
            samples[rank] += 1
    while sum(samples) > total:
        samples[max(range(len(samples)), key=lambda rank: samples[rank] - exact[rank])] -= 1
    return tuple(samples)


def _improved(model: StepModel, terms: StepTerms, ratios: tuple[int, ...]) -> tuple[int, ...]:
    """Ratios from which moving samples between two ranks makes no step shorter."""
    best, seconds = ratios, model.step(terms, ratios).total
    size = max(1, model.global_batch // 8)
    for _ in range(_MAX_ROUNDS):
        found = False
        for source in range(len(best)):
            for target in range(len(best)):
                moved = list(best)
                moved[source] -= size
                moved[target] += size
                if source == target or moved[source] < 0:
                    continue
                after = model.step(terms, tuple(moved)).total
                if after < seconds * (1.0 - _SMALLEST_GAIN) and model.fits(terms, tuple(moved)):
                    best, seconds, found = tuple(moved), after, True
        if not found:
            if size == 1:
                break
            size //= 2
    return best

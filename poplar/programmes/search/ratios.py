"""The best ratios for a programme: samples are moved between ranks while the prediction falls.

From a few starts: on 36 clusters and models, a linear programme over the ranks' parts as another
start found nothing that is faster.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import permutations

from poplar.planner.what_if import device_groups
from poplar.programmes.graph.placement import part_sizes
from poplar.programmes.search.step_model import StepModel
from poplar.programmes.search.step_terms import StepTerms

_MAX_ROUNDS = 24
_MAX_PAIRS = 240
"""Of ranks that exchange samples in a round: all of 16 ranks."""
_SMALLEST_GAIN = 1e-9


def best_ratios(
    model: StepModel, terms: StepTerms, ratios: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Samples per rank with the fewest predicted seconds for a programme; None: none fit.

    Args:
        ratios: present ones, the first start. Others are even parts, and most on one rank.
    """
    ranks = range(len(ratios))
    most = [_most_samples(model, terms, rank) for rank in ranks]
    largest = max(ranks, key=lambda rank: ratios[rank])
    starts = (ratios, [1] * len(ratios), [int(rank == largest) for rank in ranks])
    within = {samples_within(model.global_batch, start, most) for start in starts}
    improved = [
        _improved(model, terms, start)
        for start in within
        if start is not None and model.fits(terms, start)
    ]
    return min(improved, key=lambda found: model.step(terms, found).total, default=None)


def samples_within(
    total: int, ratios: Sequence[int], most: Sequence[int]
) -> tuple[int, ...] | None:
    """Samples in these ratios, moved to other ranks where there are too many; None: too many."""
    samples = part_sizes(total, ratios)
    kept = [max(0, min(own, bound)) for own, bound in zip(samples, most, strict=True)]
    for rank, bound in enumerate(most):
        kept[rank] += max(0, min(total - sum(kept), bound - kept[rank]))
    return tuple(kept) if sum(kept) == total else None


def _most_samples(model: StepModel, terms: StepTerms, rank: int) -> int:
    """The most samples with which a rank's memory suffices; -1: not even none."""
    total, ranks = model.global_batch, model.cluster.world_size

    def lacks_memory(samples: int) -> bool:
        ratios = [total - samples] * ranks
        ratios[rank] = samples * max(1, ranks - 1)
        return model.memory_bytes(terms, tuple(ratios), rank) > model.memory_limit(rank)

    most = min(total, model.cluster.devices[rank].max_batch)
    return bisect_left(range(most + 1), True, key=lacks_memory) - 1


def _improved(model: StepModel, terms: StepTerms, ratios: tuple[int, ...]) -> tuple[int, ...]:
    """Ratios from which moving samples between two ranks, or two groups, makes no step shorter.

    Equal devices are slowest together, so their samples are also moved together. With many ranks, a
    round tries each rank with a few others, in the next round with others.
    """
    best, seconds = ratios, model.step(terms, ratios).total
    groups = [group.ranks for group in device_groups(model.cluster)]
    of_groups = [pair for pair in permutations(groups, 2) if len(pair[0]) + len(pair[1]) > 2]
    size = max(1, model.global_batch // 8)
    for number in range(_MAX_ROUNDS):
        found = False
        for sources, targets in (*of_groups, *_pairs(len(best), number)):
            moved = _moved(best, sources, targets, size)
            if min(moved) < 0:
                continue
            after = model.step(terms, moved).total
            if after < seconds * (1.0 - _SMALLEST_GAIN) and model.fits(terms, moved):
                best, seconds, found = moved, after, True
        if not found:
            if size == 1:
                break
            size //= 2
    return best


def _pairs(ranks: int, number: int) -> Iterator[tuple[tuple[int], tuple[int]]]:
    """At most `_MAX_PAIRS` pairs of different ranks, with each rank as often as the others."""
    others = min(ranks - 1, max(1, _MAX_PAIRS // ranks))
    for source in range(ranks):
        for other in range(number * others, (number + 1) * others):
            yield (source,), ((source + 1 + other % (ranks - 1)) % ranks,)


def _moved(
    ratios: tuple[int, ...], sources: Sequence[int], targets: Sequence[int], size: int
) -> tuple[int, ...]:
    """Ratios after each source has given so many samples, in even parts, to the targets."""
    moved = list(ratios)
    for source in sources:
        moved[source] -= size
    received = part_sizes(size * len(sources), (1,) * len(targets))
    for target, samples in zip(targets, received, strict=True):
        moved[target] += samples
    return tuple(moved)

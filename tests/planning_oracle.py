"""A naive reference for the cost model and the search: DESIGN section 4, unit by unit.

Imports values only. `Oracle` evaluates one plan by the formulas, stage by stage. `every_batches`
lists all ways to run a small global batch, so that `search` can be compared with the best of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import random
from collections.abc import Iterator

from followed_pass import BUFFER, FollowedPass

from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)

STAGES = (0, 1, 2, 3)
SCALE = 512
"""Factor on the sizes of random models, so that units have up to two buffers."""
Batches = tuple[tuple[int, ...], ...]


class Oracle:
    """The closed form for one cluster at one stage."""

    def __init__(
        self,
        cluster: ClusterProfile,
        stage: int,
        persistent: frozenset[int] = frozenset(),
        recomputed: tuple[float, ...] = (),
    ) -> None:
        """`persistent`: units that are unsharded once a step, at stage 3. `recomputed`: by rank,
        the part of the model whose forward runs again in the backward; empty: none.
        """
        self.cluster, self.stage, self.persistent = cluster, stage, persistent
        self.recomputed = recomputed or (0.0,) * cluster.world_size
        self.n = cluster.world_size
        numels = cluster.model.unit_numels
        if stage < 3:
            resident = sorted(cluster.model.resident_units)
            others = (unit for unit in range(len(numels)) if unit not in resident)
            numels = self._in_buffers([numels[unit] for unit in (*resident, *others)])
            numels = tuple(filter(None, numels))  # without trained elements nothing is sent
        self.parts = [numel / cluster.model.numel for numel in numels]
        self.buffers = [-(-numel // BUFFER) for numel in numels]

    def _in_buffers(self, numels: list[int]) -> list[int]:
        """Consecutive units that fit into one buffer share it."""
        shared = [0]
        for numel in numels:
            if shared[-1] and shared[-1] + numel > BUFFER:
                shared.append(0)
            shared[-1] += numel
        return shared

    # Seconds

    def x(self, rank: int, batch: int) -> float:
        if batch == 0:
            return 0.0
        overhead = self.cluster.devices[rank].pass_overhead_seconds[self.stage]
        return max(0.0, self._plain_pass(rank, batch) + self._again(rank, batch) + overhead)

    def _plain_pass(self, rank: int, batch: int) -> float:
        device = self.cluster.devices[rank]
        return device.seconds(batch) if not self.recomputed[rank] else beyond(device, batch)[0]

    def _again(self, rank: int, batch: int) -> float:
        """Seconds of what runs a second time; never less than none."""
        device, part = self.cluster.devices[rank], self.recomputed[rank]
        if not part:
            return 0.0
        return part * max(0.0, recomputing(device).seconds(batch) - beyond(device, batch)[0])

    def max_batch(self, rank: int) -> int:
        """The largest batch that was measured, with or without recomputation."""
        device = self.cluster.devices[rank]
        return recomputing(device).max_batch if self.recomputed[rank] else device.max_batch

    def activation_bytes(self, rank: int, batch: int) -> float:
        device, part = self.cluster.devices[rank], self.recomputed[rank]
        if not part:
            return device.activation_bytes(batch)
        if batch > self.max_batch(rank):
            return math.inf
        plain = beyond(device, batch)[1]
        return plain - part * max(0.0, plain - recomputing(device).activation_bytes(batch))

    def reduce(self, shares: tuple[float, ...]) -> float:
        network = self.cluster.network
        rates = network.send_seconds_per_byte, network.receive_seconds_per_byte
        bound = functools.partial(self._busiest, *rates)
        return self._as_measured(network.reduce_scatter_seconds, bound, shares)

    def gather(self, shares: tuple[float, ...]) -> float:
        network = self.cluster.network
        rates = network.receive_seconds_per_byte, network.send_seconds_per_byte
        bound = functools.partial(self._busiest, *rates)
        return self._as_measured(network.all_gather_seconds, bound, shares)

    def _busiest(self, leaving, arriving, p) -> float:
        """A reduce-scatter; an all-gather with the rates exchanged. Without hosts, every rank is
        one; with them, the links within hosts are busy before the networks, if both are known.
        """
        network = self.cluster.network
        hosts = network.hosts or tuple(range(self.n))
        owned = {host: sum(p[r] for r in range(self.n) if hosts[r] == host) for host in hosts}
        shared = network.network_seconds_per_byte
        outs, intos = (shared, shared) if shared else (leaving, arriving)
        between = max(
            max((1 - owned[host]) * out, (len(owned) - 1) * owned[host] * into)
            for host, out, into in zip(hosts, outs, intos, strict=True)
        )
        if not shared:
            return between
        within = 0.0
        for r, host in enumerate(hosts):
            ranks = hosts.count(host)
            kept = p[r] + (1 - owned[host]) / ranks
            out, into = leaving[r] - shared[r], arriving[r] - shared[r]
            within = max(within, (1 - kept) * out, (ranks - 1) * kept * into)
        return within + between

    def _as_measured(self, measured, bound, shares) -> float:
        even = bound((1 / self.n,) * self.n)
        if self.n == 1 or even == 0:
            return measured
        return measured * bound(shares) / even

    def seconds(self, batches: Batches, shares: tuple[float, ...]) -> float:
        reduce, gather = self._communication(shares)
        if self.stage < 2:
            passes = [[self.x(r, b) for b in own if b] for r, own in enumerate(batches)]
            ends, lasts = [sum(p) for p in passes], [p[-1] if p else 0.0 for p in passes]
            return self._synchronize_once(ends, lasts, reduce, gather) + self._after(shares)
        columns = [[self.x(r, b) for r, b in enumerate(c)] for c in zip(*batches, strict=True)]
        total = sum(
            self._synchronize_every_pass(
                column,
                reduce,
                gather,
                is_first=number == 0,
                is_last=number == len(columns) - 1,
            )
            for number, column in enumerate(columns)
        )
        return total + self._after(shares)

    def _communication(self, shares: tuple[float, ...]) -> tuple[float, float]:
        if self.stage == 0:
            shares = (1 / self.n,) * self.n
        return self.reduce(shares), self.gather(shares)

    def _after(self, shares: tuple[float, ...]) -> float:
        """Seconds after the last synchronization."""
        stage, network = self.stage, self.cluster.network
        optimizer = max(
            device.optimizer_step_seconds(share if stage else 1.0)
            + device.step_overhead_seconds[stage]
            for device, share in zip(self.cluster.devices, shares, strict=True)
        )
        gather = self.gather(shares) if stage in (1, 2) else 0.0
        return max(0.0, optimizer + gather + network.step_seconds[stage])

    def _synchronize_once(self, ends, lasts, reduce: float, gather: float) -> float:
        if self.stage == 0:
            return self._synchronize_and_gather(ends, lasts, reduce, gather)
        return self._synchronize(ends, lasts, reduce)

    def _synchronize_every_pass(
        self, column, reduce, gather, *, is_first: bool, is_last: bool
    ) -> float:
        if self.stage == 3:
            return self._synchronize_unsharded(max(column), reduce, gather, is_first=is_first)
        if is_last:
            return self._synchronize(column, column, reduce)
        return self._synchronize_and_continue(column, reduce)

    def _reducible(self, ends, lasts) -> float:
        """When every rank has finished the backward of its last unit."""
        left = self.cluster.backward_fraction * sum(self.parts[:-1])
        return max(end - left * last for end, last in zip(ends, lasts, strict=True))

    def _synchronize(self, ends, lasts, reduce: float) -> float:
        latest, window = max(ends), max(ends) - self._reducible(ends, lasts)
        extra = self.cluster.network.synchronization_seconds[self.stage]
        overlapped = min(self.cluster.overlap * reduce * sum(self.parts[1:]), window)
        return max(latest, latest + reduce + extra - overlapped)

    def _synchronize_and_gather(self, ends, lasts, reduce: float, gather: float) -> float:
        """The last unit's reduction and the last two units' gathers overlap with nothing."""
        latest, window = max(ends), max(ends) - self._reducible(ends, lasts)
        extra = self.cluster.network.synchronization_seconds[self.stage]
        can_overlap = reduce * sum(self.parts[1:]) + gather * sum(self.parts[2:])
        overlapped = min(self.cluster.overlap * can_overlap, window)
        return max(latest, latest + reduce + gather + extra - overlapped)

    def _synchronize_and_continue(self, column, reduce: float) -> float:
        """Reductions in flight at the end of a pass may overlap with the next forward.

        These are the last unit's reduction or, if reductions take longer than the backward, as many
        buffers as may be in flight.
        """
        overlap, latest = self.cluster.overlap, max(column)
        reducible = self._reducible(column, column)
        extra = self.cluster.network.synchronization_seconds[self.stage]
        in_flight = max(2, 1 + -(-max(self.cluster.model.unit_numels) // BUFFER))
        buffers = [p / n for p, n in zip(self.parts, self.buffers, strict=True) for _ in range(n)]
        overlapped = 0.0
        if overlap:
            overlapped = min(
                overlap * reduce,
                overlap * reduce * sum(self.parts[1:]) + reducible,
                latest - reducible + overlap * reduce * sum(buffers[:in_flight]),
                latest,
            )
        return max(latest, latest + reduce + extra - overlapped)

    def _synchronize_unsharded(
        self, latest: float, reduce: float, gather: float, *, is_first: bool
    ) -> float:
        """Unit by unit: which compute each unshard and reduction overlaps with."""
        overlap, beta = self.cluster.overlap, self.cluster.backward_fraction
        extra = self.cluster.network.synchronization_seconds[self.stage]
        parts, unsharded, units = self.parts, self._unsharded_parts(), range(len(self.parts))
        comes_back = [unit for unit in units if unit not in self.cluster.model.resident_units]
        again = [unit for unit in comes_back[:-1] if unit not in self.persistent]
        arrives = [unit for unit in units if is_first or unit not in self.persistent]
        communication = gather * sum(unsharded[unit] for unit in arrives + again) + reduce
        forward = (1 - beta) * latest
        overlapped = sum(
            min(overlap * gather * unsharded[unit], forward * parts[unit - 1])
            for unit in arrives
            if unit
        )
        others = list(again)
        if others and others[-1] == comes_back[-2]:
            unit = others.pop()
            window = forward * parts[-1] + beta * latest * sum(parts[unit + 1 :])
            overlapped += min(overlap * gather * unsharded[unit], window)
        if len(comes_back) > 1 and parts[comes_back[-1]] == 0:
            # It reduces nothing. While the unit before it computes, only the next unshard runs.
            comes_back = comes_back[:-1]
            first = comes_back[-1]
            again = [unit for unit in again if unit != first]
            if others and others[-1] == comes_back[-2]:
                unit = others.pop()
                window = beta * latest * sum(parts[unit + 1 : first + 1])
                overlapped += min(overlap * gather * unsharded[unit], window)
        if comes_back:
            # In the backward: unshards of all other units, and the reductions of all units but the
            # last one that is computed and the residents.
            gathered = gather * sum(unsharded[unit] for unit in others)
            reduced = sum(parts[unit] for unit in comes_back if sum(parts[:unit])) * reduce
            window = beta * latest * sum(parts[: comes_back[-1]])
            can_overlap = [overlap * (gathered + reduced), window]
            # The backward of a unit does not begin before its unshard is complete.
            for unit in again:
                after = comes_back[comes_back.index(unit) + 1]
                late = gather * sum(unsharded[one] for one in others if one < unit)
                sent = (one for one in comes_back if sum(parts[:one]) and one <= after)
                late += reduce * sum(parts[one] for one in sent)
                can_overlap.append(window - beta * latest * sum(parts[: unit + 1]) + overlap * late)
            overlapped += min(can_overlap)
        # The rest overlaps with the next forward, up to the first unit that is unsharded.
        reduced = reduce * sum(parts[unit] for unit in comes_back if sum(parts[:unit]))
        first_arrival = min(arrives, default=len(parts))
        overlapped += min(overlap * (reduce - reduced), forward * sum(parts[:first_arrival]))
        return max(latest, latest + communication + extra - overlapped)

    def _unsharded_parts(self) -> list[float]:
        """By unit, the parts that an unshard moves: frozen parameters count by their bytes."""
        model = self.cluster.model
        frozen = model.unit_frozen_bytes or (0,) * len(self.parts)
        whole = model.param_bytes * model.numel
        return [part + own / whole for part, own in zip(self.parts, frozen, strict=True)]

    # Bytes

    def needed(self, rank: int, samples: int, share: float, *, later: bool = True) -> float:
        """The peak of a pass; `later`: other passes of the step came before it."""
        return self._peak(rank, samples, share, later=later)

    def needed_by(self, rank: int, passes: tuple[int, ...], share: float) -> float:
        """The peak of a step with these passes."""
        peaks = [
            self._peak(rank, samples, share, later=number > 0)
            for number, samples in enumerate(passes or (0,))
        ]
        return max(peaks)

    def _peak(self, rank: int, samples: int, share: float, *, later: bool) -> float:
        during, after = self._activations(rank, samples)
        state = self._state_bytes(rank, share)
        followed = FollowedPass(
            self.cluster, self.stage, share, samples, self.persistent, during, after, state
        )
        return followed.run(later=later)

    def _activations(self, rank: int, samples: int) -> tuple[list[float], list[float]]:
        """By unit, activation bytes during and after its backward."""
        whole = self.activation_bytes(rank, samples)
        units = len(self.cluster.model.unit_numels)
        found = self.cluster.devices[rank].unit_bytes(samples)
        if self.recomputed[rank] or not found[0]:
            return [whole] * units, [whole] * units
        return list(found[0]), list(found[1])

    def _state_bytes(self, rank: int, share: float) -> float:
        model = self.cluster.model
        shares = [share if self.stage >= 1 else 1.0, share if self.stage == 3 else 1.0]
        frozen = sum(model.unit_frozen_bytes)
        return (
            model.optimizer_bytes * model.numel * shares[0]
            + (model.param_bytes * model.numel + frozen) * shares[1]
            + model.frozen_bytes
            + self.cluster.devices[rank].held_bytes
        )

    def limit(self, rank: int) -> float:
        return self.cluster.devices[rank].memory_bytes * (1 - self.cluster.memory_reserve)

    def fits(self, batches: Batches, shares: tuple[float, ...], slack: float = 0.0) -> bool:
        return all(
            self.needed_by(r, own, shares[r]) <= self.limit(r) + slack
            for r, own in enumerate(batches)
        )

    # The best of all plans

    def best(self, global_batch: int, shares: list[tuple[float, ...]]) -> float:
        """The least seconds of any plan with any of these shares; infinite if none fits."""
        best = math.inf
        plans = list(self.every_batches(global_batch))
        largest = [[(own[:1] or (0,))[0] for own in batches] for batches in plans]
        after = [[max(own[1:], default=-1) for own in batches] for batches in plans]
        for p in shares:
            first = [self._holds(r, global_batch, p[r], later=False) for r in range(self.n)]
            later = [self._holds(r, global_batch, p[r], later=True) for r in range(self.n)]
            for batches, begin, rest in zip(plans, largest, after, strict=True):
                if all(map(operator.le, begin, first)) and all(
                    size < 0 or size <= held for size, held in zip(rest, later, strict=True)
                ):
                    best = min(best, self.seconds(batches, p))
        return best

    def _holds(self, rank: int, global_batch: int, share: float, *, later: bool) -> int:
        """The largest micro-batch that fits beside a share; -1: not even 0 samples do."""
        held = -1
        for batch in range(min(global_batch, self.max_batch(rank)) + 1):
            if self.needed(rank, batch, share, later=later) <= self.limit(rank):
                held = batch
        return held

    def best_by_dynamic_program(self, global_batch: int, shares: list[tuple[float, ...]]) -> float:
        """As `best`, for global batches with too many plans to list."""
        best, splits = math.inf, {}
        for p in shares:
            first, later = (
                tuple(self._holds(r, global_batch, p[r], later=kind) for r in range(self.n))
                for kind in (False, True)
            )
            if min(first) < 0 or max(first) < 1:
                continue
            if self.stage < 2:
                if (first, later) not in splits:
                    splits[first, later] = self._splits(global_batch, first, later)
                communication = self._communication(p)
                least = min(
                    (
                        self._synchronize_once([latest], [0.0], *communication)
                        if self._is_free_of_windows
                        else self._synchronize_at(latest, reducible, *communication)
                        for latest, reducible in splits[first, later]
                    ),
                    default=math.inf,
                )
            else:
                least = self._cheapest_synchronizations(global_batch, first, later, p)
            best = min(best, least + self._after(p))
        return best

    @property
    def _is_free_of_windows(self) -> bool:
        return self.cluster.overlap == 0.0

    def _synchronize_at(
        self, latest: float, reducible: float, reduce: float, gather: float
    ) -> float:
        """Two ranks: the one that ends last, and the one whose gradients are ready last."""
        left = self.cluster.backward_fraction * sum(self.parts[:-1])
        last = (latest - reducible) / left if left else 0.0
        return self._synchronize_once([latest], [last], reduce, gather)

    def _cheapest_synchronizations(self, global_batch: int, first, later, shares) -> float:
        """Sums of passes, each as long as the least time in which its samples are computed."""
        reduce, gather = self._communication(shares)

        def costs(holds, **place) -> dict[int, float]:
            times = sorted(self.x(r, b) for r, most in enumerate(holds) for b in range(1, most + 1))
            return {
                samples: self._synchronize_every_pass([latest], reduce, gather, **place)
                for samples, latest in enumerate(times[:global_batch], 1)
            }

        alone = costs(first, is_first=True, is_last=True)
        least = alone.get(global_batch, math.inf)
        if min(later) < 0:
            return least
        begin = costs(first, is_first=True, is_last=False)
        usual = costs(later, is_first=False, is_last=False)
        last = costs(later, is_first=False, is_last=True)
        before = [math.inf] * global_batch  # by samples, all passes but the last
        for n in range(1, global_batch):
            ways = [before[n - m] + seconds for m, seconds in usual.items() if m < n]
            before[n] = min([begin.get(n, math.inf), *ways])
        ways = [before[global_batch - m] + s for m, s in last.items() if m < global_batch]
        return min([least, *ways])

    def _splits(self, global_batch: int, first, later) -> list[tuple[float, float]]:
        """Pairs of the end of compute and the earliest time at which all ranks have gradients, for
        the distributions of samples that may be the best."""
        options = [self._options(r, global_batch, first[r], later[r]) for r in range(self.n)]

        def can_be(latest: float, reducible: float) -> bool:
            reached = 1  # bit n: the ranks so far can have n samples together
            for own in options:
                together = 0
                for samples, ways in enumerate(own):
                    if any(end <= latest and start <= reducible for end, start in ways):
                        together |= reached << samples
                reached = together
            return bool(reached >> global_batch & 1)

        every = {way for own in options for ways in own for way in ways}
        ends, starts = (sorted({way[part] for way in every}) for part in (0, 1))
        found, place = [], len(starts) - 1
        for latest in ends:
            if can_be(latest, starts[place]):
                while place and can_be(latest, starts[place - 1]):
                    place -= 1
                found.append((latest, starts[place]))
                if self._is_free_of_windows:
                    break
        return found

    def _options(
        self, rank: int, global_batch: int, first: int, later: int
    ) -> list[list[tuple[float, float]]]:
        """By samples: the end of compute and the time of the last pass's gradients, for every
        division into passes that no other improves in both."""
        left = self.cluster.backward_fraction * sum(self.parts[:-1])
        least, options = [0.0], [[(0.0, 0.0)]]
        for samples in range(1, global_batch + 1):
            ways = []
            for last in range(1, samples + 1):
                if last <= (first if last == samples else later):
                    end = least[samples - last] + self.x(rank, last)
                    ways.append((end, end - left * self.x(rank, last)))
            least.append(min(ways)[0] if ways else math.inf)
            ways = [way for way in ways if way[0] < math.inf]
            options.append([w for w in ways if not any(o[0] <= w[0] and o[1] < w[1] for o in ways)])
        return options

    def every_batches(self, global_batch: int) -> Iterator[Batches]:
        """All batches, except orders that change neither the formulas nor the memory.

        Both depend on the last pass, and on the first one, which has no sums beside it.
        """
        most = [min(global_batch, self.max_batch(rank)) for rank in range(self.n)]
        if self.stage < 2:
            for samples in compositions(global_batch, self.n):
                cuts = [list(self._cuts(s, m)) for s, m in zip(samples, most, strict=True)]
                yield from itertools.product(*cuts)
            return
        columns = [
            column
            for column in itertools.product(*(range(m + 1) for m in most))
            if 0 < sum(column) <= global_batch
        ]
        for chosen in self._multisets(columns, global_batch, 0):
            for ends in set(itertools.permutations(chosen, min(2, len(chosen)))):
                rest = list(chosen)
                for column in ends:
                    rest.remove(column)
                yield tuple(zip(ends[0], *rest, *ends[1:], strict=True))

    def _cuts(self, samples: int, most: int) -> Iterator[tuple[int, ...]]:
        """Every division of samples into passes with any first and last pass."""
        for parts in partitions(samples, most):
            for ends in set(itertools.permutations(parts, min(2, len(parts)))):
                rest = list(parts)
                for size in ends:
                    rest.remove(size)
                yield (*ends[:1], *rest, *ends[1:])

    def _multisets(self, columns, left, first):
        if left == 0:
            yield ()
        for index in range(first, len(columns)):
            if sum(columns[index]) <= left:
                for more in self._multisets(columns, left - sum(columns[index]), index):
                    yield (columns[index], *more)


def recomputing(device: DeviceProfile) -> DeviceProfile:
    """The device when all units are recomputed."""
    return dataclasses.replace(device, points=device.recomputed_points)


def beyond(device: DeviceProfile, batch: int) -> tuple[float, float]:
    """Seconds and bytes without recomputation. Past the largest measured batch, on the steeper of
    the line through the last two points and the line through the first and the last.
    """
    last = device.max_batch
    curves = device.seconds, device.activation_bytes
    if batch <= last:
        return curves[0](batch), curves[1](batch)
    starts = {point.batch for point in (device.points[0], *device.points[-2:-1])} - {last}
    seconds, held = (
        curve(last)
        + (batch - last)
        * max(
            [(curve(last) - curve(start)) / (last - start) for start in starts]
            or [curve(last) / last]
        )
        for curve in curves
    )
    return seconds, held


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """`total` as a sum of parts of at most `most`, ascending."""
    if total == 0:
        yield ()
        return
    for largest in range(min(total, most), 0, -1):
        for rest in partitions(total - largest, largest):
            yield (*rest, largest)


def share_grid(ranks: int, steps: int) -> list[tuple[float, ...]]:
    return [tuple(c / steps for c in parts) for parts in compositions(steps, ranks)]


def critical_shares(oracle: Oracle, global_batch: int) -> list[tuple[float, ...]]:
    """Shares at which a rank just holds some batch. The rest is divided evenly among the other
    ranks, or given to one of them."""
    found = set()
    for rank in range(oracle.n):
        others = [other for other in range(oracle.n) if other != rank]
        batches = range(min(global_batch, oracle.max_batch(rank)) + 1)
        for batch, later in itertools.product(batches, (False, True)):
            share = _just_holds(oracle, rank, batch, later=later)
            if share is None:
                continue
            spreads = [dict.fromkeys(others, 1 / max(1, len(others)))]
            spreads += [{other: 1.0} for other in others]
            for spread in spreads:
                p = [(1 - share) * spread.get(other, 0.0) for other in range(oracle.n)]
                p[rank] = share if others else 1.0
                found.add(tuple(p))
    return sorted(found)


def _just_holds(oracle: Oracle, rank: int, batch: int, *, later: bool) -> float | None:
    """The largest share beside which this rank holds a batch, by bisection; or None."""

    def fits(share: float) -> bool:
        return oracle.needed(rank, batch, share, later=later) <= oracle.limit(rank)

    if not fits(0.0):
        return None
    if fits(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def random_cluster(
    draw: random.Random, ranks: int, stage: int, *, tight: bool | None = None
) -> ClusterProfile:
    """A small cluster: equal or unequal ranks, with ample, tight or insufficient memory.

    `tight`: every rank just holds some batch and share; None: half of the clusters are.
    """
    units = tuple(draw.randint(1, 400) * 64 * SCALE for _ in range(draw.randint(1, 4)))
    residents = [unit for unit in range(len(units)) if draw.random() < 0.2]
    base = random.Random(str(units))
    frozen = tuple(base.randint(1, 2000) * 64 * SCALE for _ in units)
    if base.random() < 0.7:
        frozen = ()
    elif len(units) > 1:
        without = base.randrange(len(units))  # a unit with nothing to train
        units = tuple(0 if unit == without else own for unit, own in enumerate(units))
    model = ModelProfile(
        unit_numels=units,
        param_bytes=draw.choice((2.0, 4.0)),
        grad_bytes=draw.choice((2.0, 4.0)),
        optimizer_bytes=draw.choice((0.0, 8.0, 12.0)),
        wire_bytes=4.0,
        frozen_bytes=draw.choice((0, 5000 * SCALE)),
        unit_frozen_bytes=frozen,
        resident_units=tuple(residents),
    )
    devices = [_random_device(draw) for _ in range(ranks)]
    if draw.random() < 0.4:
        devices = [draw.choice(devices[: rank + 1]) for rank in range(ranks)]
    rates = [0.0, 1e-9, 1e-9, 2e-9, 5e-9] if draw.random() < 0.8 else [0.0]
    network = NetworkProfile(
        reduce_scatter_seconds=draw.choice((0.0, 0.02, draw.random())),
        all_gather_seconds=draw.choice((0.0, 0.02, draw.random())),
        send_seconds_per_byte=tuple(draw.choice(rates) for _ in range(ranks)),
        receive_seconds_per_byte=tuple(draw.choice(rates) for _ in range(ranks)),
        synchronization_seconds=residuals(draw, 0.05),
        step_seconds=residuals(draw, 0.05),
    )
    cluster = ClusterProfile(
        devices=tuple(devices),
        model=model,
        network=network,
        overlap=draw.choice((0.0, 0.3, 1.0, draw.random())),
        backward_fraction=draw.choice((2 / 3, draw.random())),
        memory_reserve=draw.choice((0.0, 0.05)),
    )
    return _with_memory(draw, _with_memory_by_unit(draw, cluster), stage, tight)


def _with_memory_by_unit(draw: random.Random, cluster: ClusterProfile) -> ClusterProfile:
    """Activations that shrink during the backward, or unknown ones; any use of receive buffers."""
    keeps = draw.choice(("freed", "step", "kept"))
    network = dataclasses.replace(cluster.network, receive_buffers=keeps)
    if draw.random() < 0.5:
        return dataclasses.replace(cluster, network=network)
    units = len(cluster.model.unit_numels)
    parts = sorted(draw.random() for _ in range(2 * units))

    def by_unit(device: DeviceProfile) -> DeviceProfile:
        points = tuple(
            dataclasses.replace(
                point,
                unit_bytes=tuple(int(part * point.activation_bytes) for part in parts[1::2]),
                bytes_after_unit=tuple(int(part * point.activation_bytes) for part in parts[::2]),
            )
            for point in device.points
        )
        return dataclasses.replace(device, points=points)

    devices = tuple(map(by_unit, cluster.devices))
    return dataclasses.replace(cluster, devices=devices, network=network)


def residuals(draw: random.Random, size: float) -> tuple[float, ...]:
    if draw.random() < 0.5:
        return (0.0,) * 4
    return tuple(draw.uniform(-size, size) for _ in range(4))


def _random_device(draw: random.Random) -> DeviceProfile:
    batches = sorted(draw.sample(range(1, 9), draw.randint(1, 4)))
    speed, latency = draw.choice((0.05, 0.1, 0.3)), draw.choice((0.0, 0.05, 0.3))
    sample_bytes = draw.choice((1000, 20_000, 100_000)) * SCALE
    points = tuple(
        BatchPoint(
            batch=batch,
            seconds=latency + speed * (batch if draw.random() < 0.8 else -(-batch // 4) * 4),
            activation_bytes=draw.choice((0, 3000 * SCALE)) + sample_bytes * batch,
        )
        for batch in batches
    )
    return DeviceProfile(
        name="device",
        memory_bytes=0,
        points=points,
        optimizer_seconds=draw.choice((0.0, 0.05, 0.5 * draw.random())),
        optimizer_latency_seconds=draw.choice((0.0, 0.0, 0.02, 0.2)),
        held_bytes=draw.choice((0, 10_000 * SCALE)),
        pass_overhead_seconds=residuals(draw, 0.06),
        step_overhead_seconds=residuals(draw, 0.06),
    )


def _with_memory(
    draw: random.Random, cluster: ClusterProfile, stage: int, tight: bool | None
) -> ClusterProfile:
    """Memory between the least that a plan needs and the most, or far outside."""
    oracle = Oracle(cluster, stage)
    kinds: dict[DeviceProfile, int] = {}
    is_tight = draw.random() < 0.5 if tight is None else tight
    for rank, device in enumerate(cluster.devices):
        least = oracle.needed(rank, 0, 0.0)
        batch = draw.randint(0, device.max_batch)
        share = draw.choice((0.0, 1.0 / cluster.world_size, 0.7, draw.random()))
        later = tight is None or draw.random() < 0.5
        some = oracle.needed(rank, batch, share, later=later) * draw.choice((1.0, 1.02))
        room = some if is_tight else oracle.needed(rank, device.max_batch, 1.0) * 2
        if draw.random() < 0.05:
            room = least * 0.9
        kinds.setdefault(device, math.ceil(room / (1 - cluster.memory_reserve)) + 1)
    return dataclasses.replace(
        cluster,
        devices=tuple(
            dataclasses.replace(device, memory_bytes=kinds[device]) for device in cluster.devices
        ),
    )

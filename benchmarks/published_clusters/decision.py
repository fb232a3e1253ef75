"""Decisions of a policy, layer by layer, and the step that follows from them.

All policies are sequences of `Decision`s, so that one function gives their seconds and memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from published_clusters.costs import BACKWARD, Costs, Transfer
from published_clusters.layer import BYTES, Layer
from published_clusters.step import Part, Step

Compute = Literal["batch", "columns", "rows", "experts"]
"""What ranks have parts of: samples, outputs of a layer, inputs of a layer, experts."""
Parameters = Literal["all_reduce", "server", "sharded_optimizer", "sharded", "local"]
"""How gradients are added up and parameters distributed:

- `all_reduce`: every rank updates everything;
- `server`: one rank gets gradients, and sends parameters before the next forward;
- `sharded_optimizer`: ranks update their shares, and gather parameters after the step (ZeRO-1);
- `sharded`: ranks gather parameters for each use (ZeRO-3);
- `local`: computation is divided like the parameters, so nothing is sent.
"""
Call = Literal["exact", "padded", "grouped"]
"""How a collective with uneven parts runs; see `Costs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """For one layer."""

    compute: Compute = "batch"
    batch: tuple[float, ...]
    """By rank, the part of the samples, before and after layers that are divided otherwise too."""
    width: tuple[float, ...] = ()
    """By rank, the part of columns, rows or experts."""
    parameters: Parameters = "all_reduce"
    shares: tuple[float, ...] = ()
    """By rank, the part of the parameters, where they are sharded."""
    call: Call = "exact"
    factored: bool = False
    """Whether inputs of the layer and gradients of its outputs are sent instead of gradients."""
    gathers_again: bool = False
    """Whether the backward gathers sharded parameters once more."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """For a model."""

    layers: tuple[Layer, ...]
    decisions: tuple[Decision, ...]
    global_batch: int
    largest_first: bool = False
    gradients_of_passes: int = 1

    def step(self, costs: Costs) -> Step:
        """The step on a cluster with these costs."""
        before: Decision | None = None
        parts = []
        for layer, decision in zip(self.layers, self.decisions, strict=True):
            parts.append(part_of(costs, layer, decision, before, self.global_batch))
            before = decision
        return Step(
            parts=tuple(parts),
            largest_first=self.largest_first,
            gradients_of_passes=self.gradients_of_passes,
        )

    def missing_bytes(self, costs: Costs) -> float:
        """Bytes by which the memory of a rank is too small, of the rank that lacks most."""
        ranks = range(costs.cluster.world_size)
        return max(self._missing_on(costs, rank) for rank in ranks)

    def _missing_on(self, costs: Costs, rank: int) -> float:
        state = activations = gathered = largest = 0.0
        for layer, one in zip(self.layers, self.decisions, strict=True):
            part = one.batch[rank] if one.compute == "batch" else one.width[rank]
            activations += part * self.global_batch * layer.produced
            share = 1.0
            if one.parameters == "local":
                share = one.width[rank]
            elif one.parameters in ("server", "sharded_optimizer", "sharded"):
                share = one.shares[rank]
            state += share * layer.parameters
            if one.parameters in ("server", "sharded_optimizer"):
                gathered += (1.0 - share) * layer.parameters
            elif one.parameters == "sharded":  # parameters only: gradients are reduced at once
                if one.gathers_again:
                    largest = max(largest, layer.parameters)
                else:
                    gathered += layer.parameters / 2
        return costs.missing_bytes(rank, state, activations, gathered + largest)


def part_of(
    costs: Costs, layer: Layer, decision: Decision, before: Decision | None, global_batch: int
) -> Part:
    """The part of a step for one layer.

    Args:
        costs: of the cluster.
        layer: the layer.
        decision: for it.
        before: decision for the layer before; None: it is the first one.
        global_batch: samples of all ranks.
    """
    ranks = range(costs.cluster.world_size)
    if decision.compute == "batch":
        loads = [(global_batch * decision.batch[rank], 1.0) for rank in ranks]
    else:
        loads = [(float(global_batch), decision.width[rank]) for rank in ranks]
    forward = tuple(costs.forward_seconds(rank, layer, *loads[rank]) for rank in ranks)
    part = Part(
        forward=forward,
        backward=tuple(BACKWARD * seconds for seconds in forward),
        update=tuple(0.0 for _ in ranks),
        before=_before(costs, layer, decision, before, global_batch),
        after=_after(costs, layer, decision, global_batch),
    )
    return _with_parameters(costs, layer, decision, global_batch, part)


def _before(
    costs: Costs, layer: Layer, decision: Decision, before: Decision | None, global_batch: int
) -> tuple[Transfer, ...]:
    """What moves the outputs of the layer before to where this one reads them."""
    nbytes = BYTES * layer.inputs * global_batch
    had = before.batch if before else decision.batch
    if decision.compute == "experts":
        exchanged = BYTES * layer.experts * global_batch
        return (costs.all_to_all(exchanged, had, decision.width),)
    has_columns = before is not None and before.compute == "columns"
    if decision.compute == "columns":
        shares = before.width if before is not None and has_columns else had
        return (collective(costs, nbytes, shares, decision.call),)
    if decision.compute == "rows":
        if has_columns:
            return ()
        return (costs.all_to_all(nbytes, had, decision.width),)
    if before is not None and has_columns:
        return (costs.all_to_all(nbytes, before.width, decision.batch),)
    if had != decision.batch:
        return (costs.redistribute(nbytes, had, decision.batch),)
    return ()


def _after(
    costs: Costs, layer: Layer, decision: Decision, global_batch: int
) -> tuple[Transfer, ...]:
    if decision.compute == "rows":  # every rank has a part of each sum
        nbytes = BYTES * layer.outputs * global_batch
        return (collective(costs, nbytes, decision.batch, decision.call),)
    if decision.compute == "experts":
        exchanged = BYTES * layer.experts * global_batch
        return (costs.all_to_all(exchanged, decision.width, decision.batch),)
    return ()


def _with_parameters(
    costs: Costs, layer: Layer, decision: Decision, global_batch: int, part: Part
) -> Part:
    """The part with what moves parameters and gradients, and with the update."""
    ranks, nbytes = range(costs.cluster.world_size), layer.nbytes
    kind, call, own = decision.parameters, decision.call, decision.shares

    def updates(shares: Sequence[float]) -> tuple[float, ...]:
        return tuple(costs.update_seconds(rank, shares[rank] * layer.parameters) for rank in ranks)

    if kind == "local":
        return dataclasses.replace(part, update=updates(decision.width))
    if not layer.parameters:
        return part
    if kind == "all_reduce":
        own = tuple(1.0 for _ in ranks)
        gathered, gradient = None, costs.all_reduce(nbytes)
    else:
        gradient = collective(costs, nbytes, own, call)
        gathered = costs.all_gather(nbytes, own) if call == "exact" else gradient
    part = dataclasses.replace(part, gradient=gradient, update=updates(own))
    if decision.factored:
        part = _with_factors(costs, layer, decision, own, global_batch, part)
    if kind == "sharded_optimizer":
        return dataclasses.replace(part, published=gathered)
    again = gathered if decision.gathers_again else None
    return dataclasses.replace(part, gathered=gathered, gathered_again=again)


def _with_factors(
    costs: Costs,
    layer: Layer,
    decision: Decision,
    shares: tuple[float, ...],
    global_batch: int,
    part: Part,
) -> Part:
    """Ranks gather rows and multiply all of them for their shares, instead of their own rows."""
    rows = layer.rows * global_batch
    outputs = layer.fan_out * sum(shares) / len(shares)
    product = 2.0 * rows * layer.fan_in * layer.fan_out
    more = [
        (share - own) * product / device.flops_per_s
        for share, own, device in zip(shares, decision.batch, costs.cluster.devices, strict=True)
    ]
    return dataclasses.replace(
        part,
        backward=tuple(max(0.0, s + extra) for s, extra in zip(part.backward, more, strict=True)),
        gradient=collective(
            costs, BYTES * rows * (layer.fan_in + outputs), decision.batch, decision.call
        ),
    )


def collective(costs: Costs, nbytes: float, shares: Sequence[float], call: Call) -> Transfer:
    """An all-gather or reduce-scatter of uneven parts."""
    if call == "padded":
        return costs.padded(nbytes, shares)
    if call == "grouped":
        return costs.grouped(nbytes, shares)
    return costs.reduce_scatter(nbytes, shares)

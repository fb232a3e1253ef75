"""Small units get one owner where latency costs more than bandwidth."""

from __future__ import annotations

import dataclasses

import pytest
from test_simulator import FULL, a_device
from test_unit_shares import a_named_cluster

import poplar
from poplar import predict, simulate
from poplar.planner.cost_model import costs_of
from poplar.planner.unit_owners import with_unit_owners
from poplar.values.profile import ClusterProfile

SHARDED = (1, 2, 3)
SMALL = 1000


def a_latent_cluster(*units: int, latency: float = 0.02, **changes) -> ClusterProfile:
    """One owner has a quarter of the latency of parts on both ranks."""
    cluster = a_named_cluster(*units, reduce=0.4, gather=0.2, **changes)
    network = dataclasses.replace(
        cluster.network,
        collective_latency_seconds=(latency, latency, latency / 4, latency / 4) if latency else (),
    )
    return dataclasses.replace(cluster, network=network)


MIXED = (FULL, SMALL, FULL, SMALL, FULL, SMALL, SMALL, FULL)


def found(cluster: ClusterProfile, stage: int) -> poplar.Plan:
    return poplar.search(cluster, global_batch=8, stages=(stage,))


def test_small_units_have_one_owner_and_ranks_keep_their_parts():
    plain, cluster = found(a_latent_cluster(*MIXED, latency=0.0), 3), a_latent_cluster(*MIXED)
    plan = found(cluster, 3)
    assert {unit.name for unit in plan.units if unit.shares} == {
        f"unit {number}" for number, numel in enumerate(MIXED) if numel == SMALL
    }
    assert all(set(unit.shares) == {0.0, 1.0} for unit in plan.units if unit.shares)
    owners = [unit.shares.index(1.0) for unit in plan.units if unit.shares]
    assert sorted(owners) == [0, 0, 1, 1]
    assert costs_of(cluster, plan).owned(plan.shares) == pytest.approx(plain.shares)
    assert plan.micro_batches == plain.micro_batches
    simulated = simulate(cluster, plan).step_seconds
    assert simulated < 0.98 * simulate(cluster, plain).step_seconds
    assert plan.prediction["step_seconds"] == pytest.approx(simulated, rel=0.06)


@pytest.mark.parametrize("stage", [0, *SHARDED])
@pytest.mark.parametrize(
    "cluster",
    [
        a_latent_cluster(*MIXED, latency=0.0),
        a_latent_cluster(*MIXED, latency=1e-4),
        a_latent_cluster(*(FULL,) * 8),
    ],
    ids=("not measured", "small latency", "large units"),
)
def test_plans_are_as_before_where_owners_gain_nothing(cluster, stage):
    assert not any(unit.shares for unit in found(cluster, stage).units)


def test_units_that_were_merged_before_stay_merged():
    """Their own shares would give every block its own collective at stages 1 and 2."""
    units = (FULL, *(SMALL,) * 40, FULL)
    for stage in (1, 2):
        assert not found(a_latent_cluster(*units), stage).units


def test_units_of_several_blocks_have_no_owner():
    cluster = a_latent_cluster(*MIXED)
    names = tuple(f"blocks.{2 * n}..blocks.{2 * n + 1}" for n in range(len(MIXED)))
    cluster = dataclasses.replace(
        cluster, model=dataclasses.replace(cluster.model, unit_names=names)
    )
    assert not any(unit.shares for unit in found(cluster, 3).units)


def test_owners_fit_in_memory():
    plain = found(a_latent_cluster(*MIXED, latency=0.0), 3)
    cluster = a_latent_cluster(*MIXED)
    needed = predict(cluster, plain).memory_bytes
    devices = tuple(
        dataclasses.replace(a_device(), memory_bytes=int(size / 0.95) + 1) for size in needed
    )
    tight = dataclasses.replace(cluster, devices=devices)
    plan = with_unit_owners(tight, plain)
    assert all(
        size <= 0.95 * device.memory_bytes + 1
        for size, device in zip(predict(tight, plan).memory_bytes, devices, strict=True)
    )

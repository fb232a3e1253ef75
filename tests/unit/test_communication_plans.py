"""Plans whose ranks send with 8 or 4 bits: seconds and bytes against plain formulas."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import clusters
import planning_oracle
import pytest
from all_ranks import alternatives, search
from clusters import cluster_of, network_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_oracle import STAGES
from subset import choose
from test_suggested_changes import added_by, with_memory

from poplar import Plan, predict, simulate
from poplar.drift import replanning
from poplar.ops import codec
from poplar.planner.cost_model import StageCosts
from poplar.planner.explain import explain
from poplar.planner.memory_model import Caps, rank_memory
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import memory_needed
from poplar.planner.search import WORTH_NOISE
from poplar.planner.simple_plans import PREFERENCE, simplified
from poplar.planner.what_if import with_slower_devices
from poplar.values.communication import BITS, EXACT, Communication, encoded_bytes
from poplar.values.profile import ClusterProfile, DeviceProfile, ModelProfile

GIGABIT = 1.25e8
"""Bytes per second."""
ENCODE = (1e-10, 1e-9, 2e-9)
"""Seconds per element: exact, 8 bits, 4 bits."""
DECODE = (2e-10, 1.5e-9, 2.5e-9)
NUMEL = 4 << 20
COMPRESSED = [precision for precision, bits in BITS.items() if bits]


def cluster(
    ranks: int = 2,
    *,
    rate: float = GIGABIT,
    hosts: tuple[int, ...] = (),
    within: tuple[float, float] = (0.01, 0.01),
    transport: str | None = None,
    latency: float = 1e-4,
    sample: float = 4e-3,
    known: bool = True,
    param_bytes: float = 4.0,
) -> ClusterProfile:
    """Equal ranks that compute a sample in `sample` seconds, each on a link of this rate."""
    one = clusters.device(
        memory=8 << 30,
        latency=2e-3,
        sample=sample,
        largest=64,
        sample_bytes=1000,
        optimizer_seconds=0.005,
        encode_seconds=ENCODE if known else (),
        decode_seconds=DECODE if known else (),
    )
    moved = NUMEL * (ranks - 1) / ranks / rate + 4 * latency
    network = network_of(
        (1 / rate,) * ranks,
        reduce=4 * moved + (within[0] if hosts else 0.0),
        gather=param_bytes * moved + (within[1] if hosts else 0.0),
        collective_latency_seconds=(latency,) * 2,
        hosts=hosts,
        within_host_seconds=within if hosts else (),
        transport=transport,
    )
    model = ModelProfile(unit_numels=(NUMEL // 4,) * 4, param_bytes=param_bytes)
    return cluster_of(*[one] * ranks, model=model, network=network)


def compressed(profile: ClusterProfile, precision: str, **changes: Any) -> ClusterProfile:
    communication = replace(Communication.of(precision, 2), **changes)
    return replace(profile, communication=communication)


def collectives(profile: ClusterProfile, stage: int, shares: tuple[float, ...]):
    both = StageCosts(profile, stage).collectives
    return both.reduce_scatter.seconds(shares), both.all_gather.seconds(shares)


@pytest.mark.parametrize("precision", COMPRESSED)
def test_bytes_are_those_of_the_operators(precision: str) -> None:
    numel = 64 * 1000
    assert encoded_bytes(precision) * numel == codec.encoded_bytes(numel, BITS[precision])


@pytest.mark.parametrize("precision", COMPRESSED)
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_reduction_sends_fewer_bytes_and_pays_for_the_codec(
    stage: int, precision: str, skewed: bool
) -> None:
    """Bytes, latency and what the slowest rank encodes and decodes beyond the exact form."""
    ranks, at = 3, list(BITS).index(precision)
    profile = cluster(ranks)
    shares = (0.6, 0.3, 0.1) if skewed else (1 / 3,) * 3
    buffers = 1  # units of 4 MiB share a buffer
    exact, gather = collectives(profile, stage, shares)
    busiest = max(max(1 - p, (ranks - 1) * p) for p in shares) / (1 - 1 / ranks)
    latency = buffers * 1e-4
    measured = profile.network.reduce_scatter_seconds
    ratio = encoded_bytes(precision) / 4.0
    codec_seconds = NUMEL * (
        ENCODE[at] - ratio * ENCODE[0] + ranks * max(shares) * (DECODE[at] - ratio * DECODE[0])
    )
    expected = (latency + ratio * (measured - latency)) * busiest + codec_seconds
    found, gathered = collectives(compressed(profile, precision), stage, shares)
    assert exact == pytest.approx(measured * busiest)
    assert found == pytest.approx(expected)
    whole = profile.network.all_gather_seconds
    assert gather == pytest.approx(whole * busiest)
    at = 1 if stage == 3 else at  # whose weights have 8 bits at least
    ratio = encoded_bytes("int8" if stage == 3 else precision) / 4.0
    codec_seconds = NUMEL * (DECODE[at] + max(shares) * ENCODE[at])
    expected = (latency + ratio * (whole - latency)) * busiest + codec_seconds
    assert gathered == pytest.approx(expected)


def test_between_hosts_only_what_hosts_send_is_smaller() -> None:
    profile = cluster(4, hosts=(0, 0, 1, 1))
    even, ratio = (0.25,) * 4, encoded_bytes("int8") / 4.0
    fixed = profile.network.within_host_seconds[0] + 1e-4
    measured = profile.network.reduce_scatter_seconds
    # A rank sums its own quarter, and half of what the other host owns; it adds two hosts.
    codec_seconds = NUMEL * (0.5 * ENCODE[1] + 2 * 0.25 * (DECODE[1] - ratio * DECODE[0]))
    expected = fixed + ratio * (measured - fixed) + codec_seconds
    assert collectives(compressed(profile, "int8"), 2, even)[0] == pytest.approx(expected)


def test_links_within_hosts_carry_exact_values_if_they_are_known_apart() -> None:
    profile = cluster(4, hosts=(0, 0, 1, 1), known=False, latency=0.0)
    network = replace(
        profile.network, network_seconds_per_byte=(0.5 / GIGABIT,) * 4, within_host_seconds=()
    )
    profile = replace(profile, network=network)
    within, between = StageCosts(profile, 2).collectives.reduce_scatter.levels
    found = StageCosts(compressed(profile, "int8"), 2).collectives.reduce_scatter.levels
    ratio = encoded_bytes("int8") / 4.0
    assert found[0] == within
    assert found[1][0][0].constant == pytest.approx(ratio * between[0][0].constant)


def test_without_measured_rates_the_measured_seconds_are_scaled() -> None:
    profile = cluster(2, latency=0.0, known=False)
    nothing = replace(
        profile.network, send_seconds_per_byte=(0.0,) * 2, receive_seconds_per_byte=(0.0,) * 2
    )
    profile = replace(profile, network=nothing)
    for shares in ((0.5, 0.5), (0.9, 0.1)):
        exact, _ = collectives(profile, 1, shares)
        found, _ = collectives(compressed(profile, "int4"), 1, shares)
        assert found == pytest.approx(exact * encoded_bytes("int4") / 4.0)


def random_case(seed: int, stage: int) -> tuple[ClusterProfile, str]:
    """A random cluster with codecs, and a precision."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 3)
    profile = planning_oracle.random_cluster(draw, ranks, stage)
    hosts = draw.choice(((), (0, 0, 1)[:ranks])) if ranks > 2 else ()

    def with_codec(device: DeviceProfile) -> DeviceProfile:
        each = [draw.choice((0.0, 1e-7, 1e-6)) for _ in range(3)]
        return replace(device, encode_seconds=tuple(each), decode_seconds=tuple(each[::-1]))

    network = replace(profile.network, hosts=hosts)
    devices = tuple(map(with_codec, profile.devices))
    return replace(profile, network=network, devices=devices), draw.choice(COMPRESSED)


@given(seed=st.integers(0, 2**32), stage=st.sampled_from(STAGES))
@settings(max_examples=choose(quick=10, full=60), deadline=None)
def test_the_search_finds_no_slower_plan_than_other_policies(seed: int, stage: int) -> None:
    profile, precision = random_case(seed, stage)
    wanted = {"global_batch": 6, "stages": (stage,), "communication": precision}
    try:
        found = search(profile, **wanted)
    except NoPlanFits:
        return
    assert found.communication == Communication.of(precision, stage)
    assert found.prediction["step_seconds"] == predict(profile, found).step_seconds
    seconds = predict(profile, found).step_seconds
    for policy in ("even", "paper"):
        try:
            other = search(profile, **wanted, policy=policy)
        except (NoPlanFits, ValueError):
            continue
        assert other.communication == found.communication
        assert seconds <= (1 + PREFERENCE) * predict(profile, other).step_seconds


@pytest.mark.parametrize("precision", COMPRESSED)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_the_simulator_agrees(stage: int, precision: str, overlap: float) -> None:
    for profile in (cluster(3), cluster(4, hosts=(0, 0, 1, 1))):
        profile = replace(profile, overlap=overlap)
        ranks = profile.world_size
        plan = Plan.manual([8] * ranks, stage=stage, passes=2)
        plan = replace(plan, communication=Communication.of(precision, stage))
        simulated = simulate(profile, plan).step_seconds
        predicted = predict(profile, plan).step_seconds
        assert predicted == pytest.approx(simulated, rel=0.03)
        exact = predict(profile, replace(plan, communication=EXACT)).step_seconds
        assert predicted < exact


# Memory


@pytest.mark.parametrize("precision", COMPRESSED)
@pytest.mark.parametrize("keeps", ["freed", "step"])
def test_buckets_are_smaller_and_stage_0_holds_a_copy(precision: str, keeps: str) -> None:
    """One flat buffer per unit, and two units in flight: all moments can be counted by hand."""
    profile, ranks = cluster(2), 2
    model = replace(profile.model, merged_buffers=((NUMEL // 2,),) * 2)
    network = replace(profile.network, receive_buffers=keeps)
    profile = replace(profile, model=model, network=network)
    encoded, times = encoded_bytes(precision), ranks if keeps == "freed" else ranks - 1

    def more(stage: int, share: float, **changes: Any) -> float:
        other = compressed(profile, precision, **{"parameters": "exact"} | changes)
        memories = (rank_memory(one, stage, 0) for one in (other, profile))
        needed, exact = (memory.needed(Caps(0), share) for memory in memories)
        return (needed - exact) / NUMEL

    # A rank without samples holds the most when both reductions are in flight.
    assert more(1, 0.5) == pytest.approx(encoded + times * 0.5 * (encoded - 4.0))
    assert more(0, 0.5) == pytest.approx(2 * encoded + times * 0.5 * (encoded - 4.0))
    # In a warm-up, buckets are as large as without codec.
    assert more(1, 0.5, warmup_steps=10) == pytest.approx(max(0.0, more(1, 0.5)))
    for stage in (2, 3):
        assert more(stage, 0.5) < -2.0
        assert more(stage, 0.5, warmup_steps=10) == 0.0
    # The owner's fp32 values and a copy of those that all ranks have.
    for stage in (1, 2):
        differences = more(stage, 0.5, parameters="int8") - more(stage, 0.5)
        assert differences == pytest.approx(0.5 * (4.0 + 4.0))
    codes = more(3, 0.5, parameters="int8") - more(3, 0.5)
    assert codes == pytest.approx(encoded_bytes("int8") / 4)


def test_hosts_add_in_fp32_whatever_is_sent_between_them() -> None:
    profile = cluster(4, hosts=(0, 0, 1, 1))
    plan = Plan.manual([8] * 4, stage=2)
    encoded = replace(plan, communication=Communication(gradients="int4"))
    assert memory_needed(profile, encoded) == memory_needed(profile, plan)


# The choice


def chosen(profile: ClusterProfile, **wanted: Any) -> Plan:
    return search(profile, **{"global_batch": 16, "communication": "auto"} | wanted)


def test_auto_sends_few_bits_over_a_slow_link() -> None:
    profile = cluster(2, rate=GIGABIT / 10)
    plan = chosen(profile)
    exact = chosen(profile, communication="exact")
    assert plan.communication.gradients == "int4"
    assert exact.communication == EXACT
    gain = exact.prediction["step_seconds"] / plan.prediction["step_seconds"]
    assert gain > 1.0 + WORTH_NOISE


def test_auto_takes_8_bits_where_4_gain_little_more() -> None:
    slow_at_4_bits = replace(
        cluster(2).devices[0], encode_seconds=(0.0, 0.0, 3e-8), decode_seconds=(0.0, 0.0, 0.0)
    )
    profile = replace(cluster(2), devices=(slow_at_4_bits,) * 2)
    assert chosen(profile).communication == Communication.of("int8", chosen(profile).stage)


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(cluster(2, rate=1e12), id="a fast network"),
        pytest.param(cluster(2, sample=10.0), id="long passes"),
        pytest.param(cluster(2, transport="shared_memory"), id="shared memory"),
        pytest.param(cluster(2, known=False), id="an older profile"),
        pytest.param(cluster(1), id="one rank"),
    ],
)
def test_auto_is_exact_where_the_network_is_no_bottleneck(profile: ClusterProfile) -> None:
    plan = chosen(profile)
    assert plan.communication == EXACT
    assert plan == chosen(profile, communication="exact")


@pytest.mark.parametrize("stage", STAGES)
def test_one_precision_is_what_a_stage_can_send(stage: int) -> None:
    plan = chosen(cluster(2), communication="int4", stages=(stage,))
    parameters = ("exact", "int4", "int4", "int8")[stage]
    assert plan.communication == Communication(gradients="int4", parameters=parameters)
    whole = Communication(gradients="int8", parameters="int4", warmup_steps=7)
    plan = chosen(cluster(2), communication=whole, stages=(stage,))
    assert plan.communication == whole.at(stage)
    assert plan.communication.warmup_steps == 7


def test_encoded_parameters_leave_no_state_on_the_host() -> None:
    """So a plan that needs host memory is of another stage, or none fits."""
    profile = cluster(2)
    devices = tuple(
        replace(d, host_optimizer_seconds=1e-3, host_memory_bytes=1 << 40, memory_bytes=64 << 20)
        for d in profile.devices
    )
    profile = replace(profile, devices=devices, model=replace(profile.model, optimizer_bytes=12))
    wanted = {"global_batch": 4, "stages": (1,)}
    assert search(profile, **wanted).host_state
    gradients = Communication(gradients="int8")
    assert search(profile, **wanted, communication=gradients).host_state
    with pytest.raises(NoPlanFits) as caught:
        search(profile, **wanted, communication="int8")
    more = added_by(next(one for one in caught.value.suggestions if "memory" in one))
    assert search(with_memory(profile, *more), **wanted, communication="int8")


def test_an_unknown_precision_is_an_error() -> None:
    with pytest.raises(ValueError, match="communication must be one of exact, int8, int4, auto"):
        search(cluster(2), global_batch=4, communication="int2")


# Plans made from plans


@pytest.mark.parametrize("precision", COMPRESSED)
def test_only_what_is_on_the_way_overlaps(precision) -> None:
    """Encoding takes the cores that compute; without its seconds, the overlap is as measured."""
    sent = Communication.of(precision, 2)

    def overlap(profile: ClusterProfile) -> float:
        profile = replace(profile, overlap=0.8, communication=sent)
        return StageCosts(profile, 2).overlap

    assert overlap(cluster(known=False)) == pytest.approx(0.8)
    assert overlap(cluster(rate=100 * GIGABIT)) < overlap(cluster()) < 0.8
    assert StageCosts(replace(cluster(), overlap=0.8), 2).overlap == 0.8


INT8 = Communication(gradients="int8", parameters="int8", warmup_steps=3)


def test_plans_made_from_a_plan_keep_its_communication() -> None:
    profile = cluster(3)
    wanted = {"global_batch": 24, "stages": (2,)}
    plan = search(profile, **wanted, communication=INT8)
    left_out = replace(plan, micro_batches=((12,), (12,)), shares=(0.5, 0.5), prediction=None)
    left_out = left_out.beside((1,))
    made = {
        "of_active_ranks": left_out.of_active_ranks(),
        "beside": left_out,
        "smaller batches": plan.with_largest_batches({0: 2}),
        "simplified": simplified(profile, plan, 0.5),
        "json": Plan.from_dict(plan.to_dict()),
        **{
            f"stage {p.stage}": p
            for p in alternatives(profile, global_batch=24, stages=(1, 2, 3), communication=INT8)
        },
        **{p: search(profile, **wanted, policy=p, communication=INT8) for p in ("even", "paper")},
    }
    assert {name: each.communication for name, each in made.items()} == dict.fromkeys(made, INT8)


def test_a_plan_for_changed_speeds_keeps_the_communication() -> None:
    profile = cluster(2)
    plan = search(profile, global_batch=24, stages=(1,), communication=INT8)
    slower = with_slower_devices(profile, (3.0, 1.0))
    found = replanning._faster_plan(slower, plan, steps_left=1e6, staying=(), leave_out="never")
    assert found is not None
    assert found[0].communication == INT8


def test_what_ranks_send_is_printed_and_explained() -> None:
    profile = cluster(2)
    plan = search(profile, global_batch=24, stages=(2,), communication=INT8)
    sentence = (
        "gradients sent as int8, parameters sent as int8 after 3 exact steps: "
        "the gradient is not exact"
    )
    assert sentence in str(plan)
    explanation = explain(profile, plan)
    assert sentence in str(explanation)
    assert explanation.to_dict()["communication"]["gradients"] == "int8"
    exact = search(profile, global_batch=24, stages=(2,))
    assert "exact" not in str(exact)
    assert "not exact" not in str(explain(profile, exact))

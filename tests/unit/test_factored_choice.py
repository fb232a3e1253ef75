"""The planner sends gradients of linear layers as factors where that is predicted to be faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from all_ranks import search
from clusters import cluster_of, device, network_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from poplar import Plan
from poplar.planner.calibration import refine
from poplar.planner.cost_model import costs_of, step_seconds_of
from poplar.planner.explain import explain
from poplar.planner.factored_costs import Exchange, factored_traffic, seconds_of_exchange
from poplar.planner.stage_search import worthwhile
from poplar.profiler.passes import counting_rows
from poplar.simulator.step_simulation import simulate
from poplar.values.observation import Observation
from poplar.values.profile import ClusterProfile, LinearLayer, ModelProfile
from poplar.zero.factors.layers import factorable_layers

GIGABIT = 1e9 / 8
"""Bytes per second."""
CONVOLUTIONS = 1_250_000
WIDE = LinearLayer(name="wide", unit=1, outputs=1024, inputs=6272, rows_per_sample=1)
SQUARE = LinearLayer(name="square", unit=2, outputs=1024, inputs=1024, rows_per_sample=1)
MODEL = ModelProfile(
    unit_numels=(CONVOLUTIONS, WIDE.numel, SQUARE.numel),
    unit_names=("convolutions", "wide", "square"),
    unit_forward_fraction=(0.30, 0.02, 0.01),
    unit_backward_fraction=(0.59, 0.06, 0.02),
    linear_layers=(WIDE, SQUARE),
)


def cluster(
    speeds: tuple[float, ...] = (2.0, 1.0),
    bytes_per_second: float = GIGABIT,
    model: ModelProfile = MODEL,
    names: tuple[str, ...] = (),
    latency: float = 0.0,
    peak_flops: float | None = 5e10,
) -> ClusterProfile:
    """Ranks that compute a sample in 4 ms / speed, each on a link of its own."""
    ranks = len(speeds)
    devices = (
        device(
            speed,
            name=name,
            memory=8 << 30,
            latency=0.002,
            sample=0.004,
            largest=64,
            sample_bytes=1000,
            optimizer_seconds=0.02 / speed,
            peak_flops=peak_flops and peak_flops * speed,
        )
        for name, speed in zip(names or ("CPU",) * ranks, speeds, strict=True)
    )
    whole = 4 * model.numel * (ranks - 1) / ranks / bytes_per_second
    network = network_of(
        (1 / bytes_per_second,) * ranks, whole, whole, collective_latency_seconds=(latency,) * 2
    )
    return cluster_of(*devices, model=model, network=network, backward_fraction=0.67)


def step_seconds(profile: ClusterProfile, plan: Plan) -> float:
    return step_seconds_of(profile, plan)


@pytest.mark.parametrize("stage", range(4))
def test_few_rows_on_a_slow_link_are_factored(stage: int) -> None:
    profile = cluster()
    plan = search(profile, global_batch=32, stages=[stage])
    plain = search(profile, global_batch=32, stages=[stage], factored="never")
    assert plan.factored == ("square", "wide")
    assert plain.factored == ()
    assert step_seconds(profile, plan) < step_seconds(profile, plain) / 1.2


def test_rows_beyond_the_break_even_are_not() -> None:
    """At stage 0: 1024 rows for the square layer, 1760 for the wide one, if products are free."""
    tokens = [replace(layer, rows_per_sample=50) for layer in (WIDE, SQUARE)]
    profile = cluster(model=replace(MODEL, linear_layers=tuple(tokens)), peak_flops=None)
    even = Plan.even(2, 24, 24, 0)
    assert worthwhile(profile, even) == ("wide",)
    assert worthwhile(profile, Plan.even(2, 64, 64, 0)) == ()
    assert search(profile, global_batch=64, stages=[0]).factored == ()


def test_a_fast_network_or_a_long_latency_leaves_reductions() -> None:
    assert search(cluster(bytes_per_second=1e12), global_batch=32).factored == ()
    assert search(cluster(latency=1.0), global_batch=32, stages=[1]).factored == ()


def test_where_all_ranks_multiply_they_must_do_so_with_the_same_bits() -> None:
    """Devices of one name may have other kernels, precisions or threads. At other stages each
    element is computed by one rank.
    """
    unlike = [cluster(names=("A", "B"))]
    for texts in (("8 threads", "4 threads"), ("8 threads", "")):
        pairs = zip(cluster().devices, texts, strict=True)
        devices = tuple(replace(device, multiplication=text) for device, text in pairs)
        unlike.append(replace(cluster(), devices=devices))
    for profile in unlike:
        assert search(profile, global_batch=32, stages=[0]).factored == ()
        assert search(profile, global_batch=32, stages=[1]).factored != ()


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_sends_nothing(stage: int) -> None:
    assert not search(cluster((2.0,)), global_batch=24, stages=(stage,)).factored


def test_contributions_of_two_ranks_are_explained() -> None:
    """Without either of them, one rank remains."""
    two = cluster()
    plan = search(two, global_batch=24, stages=(1,))
    assert len(explain(two, plan).contributions) == 2


def test_without_measured_rates_nothing_is_factored() -> None:
    profile = cluster()
    zeros = (0.0, 0.0)
    network = replace(profile.network, send_seconds_per_byte=zeros, receive_seconds_per_byte=zeros)
    assert search(replace(profile, network=network), global_batch=32).factored == ()


@given(
    st.lists(st.floats(0.2, 4.0), min_size=2, max_size=4),
    st.floats(1e6, 1e11),
    st.integers(1, 64),
    st.sampled_from(range(4)),
)
def test_factors_never_make_the_predicted_step_slower(
    speeds: list[float], bytes_per_second: float, global_batch: int, stage: int
) -> None:
    profile = cluster(tuple(speeds), bytes_per_second)
    plan = search(profile, global_batch=global_batch, stages=[stage])
    plain = search(profile, global_batch=global_batch, stages=[stage], factored="never")
    assert step_seconds(profile, plan) <= step_seconds(profile, plain)


@given(st.floats(1e6, 1e10), st.sampled_from(range(4)), st.integers(1, 3))
def test_the_simulator_agrees(bytes_per_second: float, stage: int, passes: int) -> None:
    profile = cluster(bytes_per_second=bytes_per_second)
    plan = Plan.manual("8,4", stage=stage, passes=passes)
    for factored in ((), ("wide",), ("square", "wide")):
        chosen = replace(plan, factored=factored)
        simulated = simulate(profile, chosen).step_seconds
        assert simulated == pytest.approx(step_seconds(profile, chosen), rel=0.1)


@pytest.mark.parametrize("stage", range(4))
def test_what_is_hidden_is_at_most_what_is_communicated(stage: int) -> None:
    """A negative residual is communication that ran beside compute."""
    residuals = replace(
        cluster().network, synchronization_seconds=(-9.0,) * 4, step_seconds=(-8.0,) * 4
    )
    profile = replace(cluster(), network=residuals)
    plan = Plan.manual("8,4", stage=stage)
    plain, factored = (
        costs_of(profile, replace(plan, factored=names)) for names in ((), ("square", "wide"))
    )
    assert (plain.synchronization_residual, plain.step_residual) == (-9.0, -8.0)
    communication = sum(factored.communication(plan.shares))
    assert communication < 0.5
    assert factored.step_residual == pytest.approx(-communication)
    assert factored.synchronization_residual == pytest.approx(-communication)
    slow = residuals.with_residuals(stage, synchronization=0.02, step=-1e-3)
    costs = costs_of(replace(profile, network=slow), replace(plan, factored=("wide",)))
    assert (costs.synchronization_residual, costs.step_residual) == (0.02, -1e-3)


@pytest.mark.parametrize("stage", range(2))
@pytest.mark.parametrize("hidden", [-0.05, 0.0, 1e-3, 0.1])
def test_residuals_are_recovered_from_plans_with_factors(stage: int, hidden: float) -> None:
    plan = Plan.manual("8,4", stage=stage)
    plans = [plan, replace(plan, factored=("square", "wide"))]
    network = cluster().network.with_residuals(stage, synchronization=0.0, step=-hidden)
    true = replace(cluster(), network=network)
    seen = [
        Observation(
            plan=each,
            step_seconds=step_seconds(true, each),
            pass_seconds=tuple(
                tuple(device.seconds(size) for size in own)
                for device, own in zip(true.devices, each.micro_batches, strict=True)
            ),
            other_seconds=(0.0, 0.0),
        )
        for each in plans
    ]
    for number in (0, 1):
        found = refine(cluster(), seen[number : number + 1], asynchronous=False)
        expected = step_seconds(true, plans[number])
        assert step_seconds(found, plans[number]) == pytest.approx(expected)
    found = refine(cluster(), seen, asynchronous=False)
    for each in plans:
        assert step_seconds(found, each) == pytest.approx(step_seconds(true, each))


def test_a_plan_with_layers_that_the_profile_lacks_is_an_error() -> None:
    plan = replace(Plan.manual("8,4", stage=1), factored=("head",))
    with pytest.raises(ValueError, match=r"layers \['head'\], which the profile does not have"):
        costs_of(cluster(), plan)


def test_rows_are_counted_by_layer_over_all_calls() -> None:
    model = nn.ModuleDict({"once": nn.Linear(4, 3), "twice": nn.Linear(3, 3)})
    with counting_rows(model) as rows:
        hidden = model["once"](torch.ones(5, 7, 4))
        model["twice"](model["twice"](hidden))
    assert rows == {"once": 35, "twice": 70}
    model["once"](torch.ones(1, 4))
    assert rows["once"] == 35, "outside of the context nothing is counted"


# Bytes


LAYERS = ((4096, 25088), (1000, 4096), (768, 3072), (37, 26), (1, 1))


def layer_of(outputs: int, inputs: int) -> LinearLayer:
    return LinearLayer(name="a", unit=0, outputs=outputs, inputs=inputs, rows_per_sample=1)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("outputs", "inputs"), LAYERS)
def test_factors_are_as_many_elements_as_a_reduction_at_the_break_even(
    outputs: int, inputs: int, ranks: int, replicated: bool
) -> None:
    """The break-even of the table in `docs/guides/which-stage.md`."""
    reduced = (1 + replicated) * (ranks - 1) * outputs * inputs
    rows = outputs * inputs / (inputs + outputs / ranks)
    if replicated:
        rows = 2 * outputs * inputs / (outputs + inputs)
    owned = (1.0 if replicated else 1 / ranks,) * ranks
    traffic = factored_traffic(layer_of(outputs, inputs), (rows / ranks,) * ranks, owned)
    assert sum(rank.leaving for rank in traffic) == pytest.approx(reduced)


@pytest.mark.parametrize("owned", [(0.6, 0.4, 0.0), (1.0, 1.0, 1.0)])
def test_what_ranks_send_is_what_ranks_receive(owned: tuple[float, ...]) -> None:
    traffic = factored_traffic(layer_of(7, 11), (5, 0, 3), owned)
    leaving, arriving = zip(*((rank.leaving, rank.arriving) for rank in traffic), strict=True)
    assert sum(leaving) == pytest.approx(sum(arriving))
    assert all(got == 0 for got, part in zip(arriving, owned, strict=True) if part == 0.0)


@pytest.mark.parametrize(("param_bytes", "wire_bytes"), [(4, 4), (2, 4), (2, 2), (4, 2)])
def test_inputs_take_the_bytes_in_which_they_are_sent(param_bytes: int, wire_bytes: int) -> None:
    """`FactoredParameter.dtypes`: inputs as computed, if that is narrower, gradients as reduced."""
    model = replace(MODEL, param_bytes=param_bytes, wire_bytes=wire_bytes)
    profile = cluster((1.0, 1.0), peak_flops=None, model=model)
    reduction = wire_bytes * model.numel / 2 / GIGABIT
    profile = replace(profile, network=replace(profile.network, reduce_scatter_seconds=reduction))
    exchange = Exchange(WIDE, (5.0, 3.0))
    seconds = seconds_of_exchange(profile, exchange, (1.0, 0.0), replicated=False)
    row = min(param_bytes, wire_bytes) * WIDE.inputs + wire_bytes * WIDE.outputs
    assert seconds == pytest.approx(3.0 * row / GIGABIT)


def test_tied_and_frozen_layers_cannot_be_factored() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("free", "frozen", "one", "other")})
    model["other"].weight = model["one"].weight
    model["frozen"].requires_grad_(False)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert list(factorable_layers(model, trained)) == ["free"]

"""Plans that send with fewer bits are tuned and verified, and verification shows their noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Pool

import poplar
from poplar import Plan
from poplar.tuning.autotune import Tuned, tune
from poplar.tuning.verification import Verification
from poplar.values.communication import Communication
from poplar.zero.stages.strategy import Strategy

PLAN = Plan(stage=0, global_batch=6, micro_batches=((2, 2), (2, 0)), shares=(0.6, 0.4))
SPEC = ModelSpec(kind="mlp", blocks=2, width=24, hidden=40)


def verified(plan: Plan) -> tuple[Verification, bool]:
    """The result, and whether the parameters are those of before."""
    model = models.build(SPEC)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batch = models.data(plan.global_batch, seed=0)
    found = poplar.verify(
        model, models.mean_over_samples, batch, plan, process_group=harness.group()
    )
    return found, all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("precision", "least", "most"), [("int8", 1e-4, 0.03), ("int4", 0.01, 0.5)]
)
def test_verification_shows_the_noise_and_does_not_fail_for_it(
    ranks: Pool, stage: int, precision: str, least: float, most: float
) -> None:
    # With a warm-up, the first steps would show no noise.
    communication = replace(Communication.of(precision, stage), warmup_steps=5)
    plan = replace(PLAN, stage=stage, communication=communication)
    for found, is_restored in ranks.run(verified, plan, ranks=2):
        assert is_restored
        assert found.ok, str(found)
        assert found.gradient_noise is not None
        assert least < found.gradient_noise < most
        assert "ok: sent exactly, the plan gives the gradient of one process" in str(found)
        assert f"its relative error is {found.gradient_noise:.1e}" in str(found)
        assert found.to_dict()["communication"]["gradients"] == precision
        assert not replace(found, gradient_noise=float("nan")).ok
        assert not replace(found, gradient_noise=1.5).ok


def test_verification_of_an_exact_plan_says_nothing_of_noise(ranks: Pool) -> None:
    for found, _ in ranks.run(verified, PLAN, ranks=2):
        assert found.ok
        assert found.gradient_noise is None
        assert "error is" not in str(found)


def tuned(communication: Any) -> Tuned:
    return tune(
        models.build(SPEC),
        models.mean_over_samples,
        models.data(8, seed=0),
        global_batch=16,
        stage=2,
        seconds=2.0,
        max_batch=8,
        cache=False,
        communication=communication,
        optimizer_class=torch.optim.SGD,
        process_group=harness.group(),
        lr=0.1,
    )


def tuned_and_what_it_sends(communication: Communication) -> tuple[Tuned, set[str]]:
    """The result, and in which way gradients were sent while it was found."""
    encodes, ways = Strategy.next_codec, set()

    def watched(*given: Any) -> Any:
        codec = encodes(*given)
        ways.add("exact" if codec is None else f"int{codec.bits}")
        return codec

    with mock.patch.object(Strategy, "next_codec", watched):
        return tuned(communication), ways


def test_tuning_measures_the_codec_and_plans_as_asked(ranks: Pool) -> None:
    whole = Communication(gradients="int8", parameters="int8", warmup_steps=200)
    for found, ways in ranks.run(tuned_and_what_it_sends, whole, ranks=2):
        assert "int8" in ways  # in trials, of which all steps would be exact ones at the start
        assert found.plan.communication == whole
        assert all(seen.plan.communication == whole for seen in found.observations)
        for device in found.profile.devices:
            assert len(device.encode_seconds) == len(device.decode_seconds) == 3
            assert min(*device.encode_seconds, *device.decode_seconds) > 0.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_verification_names_what_its_error_is_of(ranks: Pool, stage: int) -> None:
    # Before the first update, stages 1 and 2 have sent no difference of parameters.
    plan = replace(PLAN, stage=stage, communication=Communication.of("int8", stage))
    ((found, _), *_) = ranks.run(verified, plan, ranks=2)
    assert ("parameters sent" in str(found)) is (stage == 3)
    assert "gradients sent as int8" in str(found)


def test_verification_shows_no_error_of_updates_alone(ranks: Pool) -> None:
    plan = replace(PLAN, stage=1, communication=Communication(parameters="int8"))
    for found, _ in ranks.run(verified, plan, ranks=2):
        assert found.ok
        assert found.gradient_noise is None

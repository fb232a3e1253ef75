"""Passes on the engine give the points of plain passes, for models and batches that fit nowhere."""

from __future__ import annotations

from typing import Any

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Pool
from subset import choose

from poplar.comm import Group
from poplar.profiler.engine_passes import sharded_passes
from poplar.profiler.request import Request
from poplar.profiler.session import Session

MODELS = {
    "transformer": ModelSpec(blocks=3, width=64, hidden=200),
    "frozen": ModelSpec(blocks=3, frozen=True),
    "tied and recomputed": ModelSpec(blocks=4, tied=True, checkpointing=True),
    "one block used several times": ModelSpec(kind="albert"),
    "unused parameters": ModelSpec(blocks=2, unused=True),
}


def session_on(spec: ModelSpec, **options: Any) -> Session:
    request = Request(
        model=models.build(spec),
        loss_fn=models.mean_over_samples,
        example=models.data(3, seed=1),
        optimizer_class=torch.optim.AdamW,
        optimizer_options={},
        max_batch=8,
        memory_limit=None,
        stages=(0,),
        seconds=1.0,
        max_norm=None,
        units=None,
        compute_dtype=options.get("compute_dtype", "auto"),
        reduce_dtype=torch.float32,
        allow_batch_norm=False,
    )
    return Session(request, Group.of(harness.group(), None))


def both_ways(spec: ModelSpec, sizes: list[list[int]], options: dict[str, Any]) -> Any:
    """Activation bytes of this rank's sizes, plain and on the engine."""
    session = session_on(spec, **options)
    own = sizes[harness.rank()]
    before = {name: value.clone() for name, value in session.request.model.state_dict().items()}
    with session.measuring():
        with session.as_in_training():
            plain = [session.passes().first(size) for size in own]
        with sharded_passes(session) as passes:
            passes.together(passes.check)
            sharded = passes.together(lambda: [passes.first(size) for size in own])
    after = session.request.model.state_dict()
    changed = [name for name, value in after.items() if not value.equal(before[name])]
    return [p.activation_bytes for p in plain], [p.activation_bytes for p in sharded], changed


@pytest.mark.parametrize("name", choose(quick=list(MODELS)[:3], full=list(MODELS)))
def test_activations_are_those_of_plain_passes(ranks: Pool, name: str) -> None:
    """Each rank measures its own sizes, and some measure none."""
    sizes = [[1, 5], [2], [], [3, 1, 4]]
    for plain, sharded, changed in ranks.run(both_ways, MODELS[name], sizes, {}):
        assert changed == []
        assert sharded == pytest.approx(plain, rel=0.03)


def test_activations_in_a_lower_precision_are_those_of_plain_passes(ranks: Pool) -> None:
    options = {"compute_dtype": torch.bfloat16}
    for plain, sharded, changed in ranks.run(
        both_ways, MODELS["transformer"], [[2], [5]], options, ranks=2
    ):
        assert changed == []
        assert sharded == pytest.approx(plain, rel=0.03)

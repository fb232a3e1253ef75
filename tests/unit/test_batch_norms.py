"""BatchNorm that takes the statistics of a micro-batch is refused by steps, and named by verify."""

from __future__ import annotations

import pytest
from torch import nn

from poplar.tuning.verification.one_process import _known_modules
from poplar.zero.checks.model_checks import batch_norms, reject_batch_norm


def norms(*, training: bool) -> nn.Module:
    without = nn.BatchNorm1d(2, track_running_stats=False)
    return nn.ModuleDict({"without": without, "with": nn.BatchNorm1d(2)}).train(training)


def test_batch_norm_without_running_statistics_is_refused_in_evaluation_mode() -> None:
    model = norms(training=False)
    advice = "build it with track_running_stats=True and freeze it with .eval()"
    with pytest.raises(ValueError, match=f"'without' is a BatchNorm with .*{advice}"):
        reject_batch_norm(batch_norms(model), allowed=False)
    reject_batch_norm(batch_norms(model), allowed=True)
    reject_batch_norm(batch_norms(model["with"]), allowed=False)


def test_verify_names_batch_norms_with_the_advice_for_each() -> None:
    (note,) = _known_modules(norms(training=False))
    assert note.startswith("'without': BatchNorm with track_running_stats=False takes")
    assert "build it with track_running_stats=True" in note
    in_training, always = _known_modules(norms(training=True))
    assert in_training.startswith("'with': BatchNorm in training mode")
    assert always == note

"""An argument that neither Poplar nor the optimizer has is named, with the one that was meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poplar.zero.optimizers.optimizer_class import check_option_names

OWN = ("seconds", "global_batch", "communication")


@pytest.mark.parametrize(
    ("name", "meant"), [("second", "seconds"), ("wieght_decay", "weight_decay"), ("xyz", None)]
)
def test_unknown_options_are_named(name: str, meant: str | None) -> None:
    with pytest.raises(TypeError) as error:
        check_option_names(torch.optim.AdamW, {"lr": 0.1, name: 1}, OWN)
    text = f"{name!r} is neither an argument of this call nor of AdamW, which gets all others"
    assert str(error.value) == text + (f"; did you mean {meant!r}?" if meant else "")


def any_options(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters)


class WithoutSignature(type):
    """Its classes have no signature that can be read."""

    __signature__ = "unreadable"


class Opaque(torch.optim.SGD, metaclass=WithoutSignature):
    pass


@pytest.mark.parametrize("factory", [torch.optim.AdamW, any_options, Opaque])
def test_options_that_the_class_may_have_pass(factory: Any) -> None:
    known = {"lr": 0.1} if factory is torch.optim.AdamW else {"anything": 1}
    check_option_names(factory, known, OWN)

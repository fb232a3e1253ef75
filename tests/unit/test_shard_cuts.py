"""Which points cut flat parameters, and how near whole parameters come to the shares."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import bitsandbytes
import pytest
import torch
import torchao.optim
import transformers.optimization
from torch import nn
from whole_tensor_optimizers import ClippedAdamW, ClippedLamb, Lamb, Noisy, Preconditioned

from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.optimizers.granularity import granularity_of, step_of
from poplar.zero.shard_cuts import layouts_under

CPU = torch.device("cpu")


def flat_of(numels: list[int], granularity: Any) -> FlatParameter:
    return FlatParameter(
        "unit",
        [(f"p{i}", nn.Parameter(torch.empty(n, device="meta"))) for i, n in enumerate(numels)],
        dtype=torch.float32,
        trained=True,
        groups=[0] * len(numels),
        steps=[step_of(granularity, numel) for numel in numels],
    )


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("granularity", ["parameter", 256, "mixed"])
def test_ranks_own_their_shares_but_for_one_parameter(granularity: Any, seed: int) -> None:
    random_ = random.Random(seed)
    ranks = random_.randint(2, 8)
    weights = [random_.choice([0.0, 0.1, 1.0]) * random_.random() for _ in range(ranks - 1)] + [0.3]
    shares = [weight / sum(weights) for weight in weights]
    flats = []
    for index in range(random_.randint(1, 12)):
        numels = [
            int(64 * min(2000.0, random_.paretovariate(0.7))) for _ in range(random_.randint(1, 9))
        ]
        needs = ("elements", "parameter")[index % 2] if granularity == "mixed" else granularity
        flats.append(flat_of(numels, needs))
    layouts = layouts_under(dict.fromkeys(flats, shares))
    largest = max(parameter.numel() for flat in flats for parameter in flat.parameters)
    total = sum(flat.numel for flat in flats)
    for rank, share in enumerate(shares):
        owned = sum(layout.size(rank) for layout in layouts.values())
        assert abs(owned - share * total) <= largest
        assert owned == 0 or share > 0
    for flat, layout in layouts.items():
        assert layout.numel == flat.numel
        for offset in layout.offsets:
            assert offset == flat.numel or flat.cuts_around(offset)[0] == offset


def test_parts_are_multiples_of_blocks_and_not_too_small_to_be_quantised() -> None:
    flat = flat_of([3 * 4096 + 256, 4096 + 256, 2 * 4096 + 1, 100], 256)
    assert flat.steps == (4096, 0, 0, 0)
    points, at = [0], 0
    while at < flat.numel:
        at = flat.cuts_around(at)[1]
        points.append(at)
    assert points[:4] == [0, 4096, 8192, flat.offsets[1]]
    assert points[4:] == [*flat.offsets[2:], flat.numel]


@pytest.mark.parametrize(
    ("cls", "options", "needs"),
    [
        (torch.optim.AdamW, {}, "elements"),
        (torch.optim.Muon, {}, "parameter"),
        (torch.optim.Adafactor, {}, "parameter"),
        (transformers.optimization.Adafactor, {}, "parameter"),
        (bitsandbytes.optim.PagedAdamW8bit, {}, 256),
        (bitsandbytes.optim.Adam, {"optim_bits": 8}, 256),
        (bitsandbytes.optim.LAMB8bit, {}, "parameter"),
        (torchao.optim.AdamW8bit, {}, 256),
        (torchao.optim.AdamW4bit, {}, 128),
        (torchao.optim.AdamWFp8, {"block_size": 512}, 512),
    ],
)
def test_what_classes_need(cls: Any, options: dict[str, Any], needs: Any) -> None:
    assert granularity_of(cls, options, CPU) == needs


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Lamb, {}),
        (Preconditioned, {}),
        (Noisy, {"lr": 1e-2}),
        (torch.optim.Muon, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True, "lr": 0.0}),
        (torch.optim.SGD, {"lr": 1e-6, "momentum": 0.9}),
        (transformers.optimization.Adafactor, {}),
        (bitsandbytes.optim.AdamW8bit, {}),
        (torchao.optim.AdamW8bit, {"bf16_stochastic_round": True}),
    ],
)
def test_classes_may_be_given_whole_parameters(cls: Any, options: dict[str, Any]) -> None:
    random_state = torch.get_rng_state()
    with mock.patch.object(torch, "compile", lambda function, **_: function):  # of torchao
        assert granularity_of(cls, options, CPU, "parameter") == "parameter"
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("lr", [1e-2, 1e-5])
@pytest.mark.parametrize(
    ("cls", "granularity", "reason"),
    [
        (ClippedLamb, "parameter", "depends on other parameters"),
        (ClippedAdamW, "parameter", "depends on other parameters"),
        (ClippedAdamW, 64, "depends on other elements"),
        (ClippedAdamW, None, "depends on other elements"),
    ],
)
def test_a_norm_over_all_parameters_is_refused(
    cls: Any, granularity: Any, reason: str, lr: float
) -> None:
    with pytest.raises(ValueError, match=f"{cls.__name__} cannot .* {reason}"):
        granularity_of(cls, {"lr": lr}, CPU, granularity)


class Counting(torch.optim.SGD):
    """Counts steps in the param group, as Adan and LAMB of timm do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("granularity", [None, "elements", "parameter", 64])
def test_no_granularity_is_advised_for_state_in_the_param_group(granularity: Any) -> None:
    with pytest.raises(ValueError, match=r"Counting .* group \(step\).* such as AdamW$"):
        granularity_of(Counting, {"lr": 0.1}, CPU, granularity)

"""The encoder of the examples: attention, masks, loss, and exact training on unequal ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.utils.data import default_collate
from training import RELATIVE, assert_close, assert_same, whole_parameters

from poplar import HeteroZeroOptimizer, Plan
from poplar.cli.workload import load

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import encoder
from encoder import BYTES, MASK, Encoder, EncoderConfig, MaskedBytes, masked_byte_loss
from text import ByteWindows

EXAMPLES = Path(encoder.__file__).parent
SMALL = EncoderConfig(width=24, layers=2, heads=2, context=32)
ADAM = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.05}
STARTS = (0, 12, 24)
"""The first of the 12 samples of each step."""


def windows(context: int, count: int = 64) -> ByteWindows:
    """Windows of random bytes, which cannot be predicted from each other."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(BYTES, (count * context + 1,), generator=generator, dtype=torch.uint8)
    return ByteWindows(text, context)


def new_model() -> Encoder:
    """The same weights in every process, large enough that each of them matters."""
    torch.manual_seed(0)
    model = Encoder(SMALL)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
        else:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def samples(start: int, stop: int) -> dict[str, Tensor]:
    """A batch of masked windows."""
    data = MaskedBytes(windows(SMALL.context), seed=3)
    return default_collate([data[index] for index in range(start, stop)])


def test_attention_equals_torch():
    """torch's own module has a bias for keys; at zero it has no effect."""
    torch.manual_seed(0)
    own = encoder.Attention(SMALL)
    other = nn.MultiheadAttention(SMALL.width, SMALL.heads, batch_first=True)
    projections = (own.queries, own.keys, own.values)
    other.in_proj_weight.data = torch.cat([layer.weight.data for layer in projections])
    zeros = torch.zeros(SMALL.width)
    other.in_proj_bias.data = torch.cat([own.queries.bias.data, zeros, own.values.bias.data])
    other.out_proj = own.out
    x = torch.randn(3, 9, SMALL.width)
    torch.testing.assert_close(own(x), other(x, x, x)[0], rtol=1e-5, atol=1e-6)


def test_selected_positions_equal_the_full_output():
    torch.manual_seed(0)
    model, data = Encoder(SMALL), MaskedBytes(windows(SMALL.context))
    batch = default_collate([data[index] for index in range(3)])
    everywhere = model(batch["input"])
    assert everywhere.shape == (3, SMALL.context, BYTES)
    rows = [row[places] for row, places in zip(everywhere, batch["places"], strict=True)]
    asked = model(batch["input"], batch["places"])
    torch.testing.assert_close(asked, torch.stack(rows), rtol=1e-5, atol=1e-6)


def test_input_longer_than_the_context_raises():
    model = Encoder(SMALL)
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, BYTES)
    with pytest.raises(ValueError, match="33 bytes do not fit the context of 32"):
        model(torch.zeros(1, 33, dtype=torch.long))


def test_loss_is_the_cross_entropy_at_the_masked_places_only():
    model, batch = new_model(), samples(0, 4)
    chances = model(batch["input"]).log_softmax(-1)
    expected = -torch.stack(
        [
            chances[row, place, byte]
            for row in range(4)
            for place, byte in zip(batch["places"][row], batch["target"][row], strict=True)
        ]
    ).mean()
    torch.testing.assert_close(masked_byte_loss(model, batch), expected, rtol=1e-5, atol=0)


def test_masks_depend_only_on_seed_and_index():
    data, again = (MaskedBytes(windows(64), seed=1) for _ in range(2))
    backwards = [again[index] for index in reversed(range(len(again)))]
    torch.manual_seed(99)
    for index, sample in enumerate(reversed(backwards)):
        for name, tensor in data[index].items():
            assert torch.equal(tensor, sample[name])
    others = MaskedBytes(windows(64), seed=2)
    assert not torch.equal(others[0]["places"], data[0]["places"])


@pytest.mark.parametrize(("context", "number"), [(1, 1), (5, 1), (20, 3), (64, 10), (100, 15)])
def test_masks_change_the_same_number_of_bytes_in_every_sample(context, number):
    plain = windows(context)
    data = MaskedBytes(plain)
    for index in range(len(data)):
        sample, text = data[index], plain[index]["input"]
        assert sample["places"].shape == sample["target"].shape == (number,)
        assert sample["places"].unique().numel() == number
        filled_in = sample["input"].index_put((sample["places"],), sample["target"])
        assert torch.equal(filled_in, text)


def test_masks_replace_bytes_as_bert_does():
    """Within four standard deviations of 80, 10 and 10 % of about 15,000 positions."""
    data = MaskedBytes(windows(100, count=1000))
    every = [data[index] for index in range(len(data))]
    shown = torch.cat([sample["input"][sample["places"]] for sample in every])
    target = torch.cat([sample["target"] for sample in every])
    masks, unchanged = (float(what.float().mean()) for what in (shown == MASK, shown == target))
    deviation = (0.8 * 0.2 / shown.numel()) ** 0.5
    assert abs(masks - 0.8) < 4 * deviation
    assert abs(unchanged - (0.1 + 0.1 / BYTES)) < 4 * deviation
    swapped = shown[(shown != MASK) & (shown != target)]
    assert swapped.unique().numel() == BYTES


def test_command_line_accepts_the_encoder():
    work = load(f"{EXAMPLES}/workload.py:encoder")
    assert work.loss_fn(work.model, work.batch_of(2)).requires_grad


def train_on_ranks(plan: Plan) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and losses after three steps on ranks, each with its part of the batch."""
    rank, device = harness.rank(), harness.device()
    model = new_model().to(device)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, process_group=harness.group(), **ADAM
    )
    begin, count = sum(map(plan.samples, range(rank))), plan.samples(rank)
    losses = []
    for start in STARTS:
        own = samples(start + begin, start + begin + count) if count else None
        own = own and {name: tensor.to(device) for name, tensor in own.items()}
        losses.append(float(optimizer.train_step(masked_byte_loss, own).loss))
    return whole_parameters(model, optimizer), losses


def train_alone() -> tuple[dict[str, Tensor], list[float]]:
    """The same steps in this process with plain torch."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for start in STARTS:
        loss = masked_byte_loss(model, samples(start, start + 12))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def test_training_on_unequal_ranks_equals_one_process(ranks: Pool) -> None:
    """Tolerances are those of test_exact_steps.py, with the same eps of 1e-5."""
    expected, expected_losses = train_alone()
    plan = Plan.manual("5,0,3,4", stage=3, shares=(0.55, 0.25, 0.0, 0.2))
    trained = ranks.run(train_on_ranks, plan)
    for parameters, losses in trained:
        assert_same(parameters, trained[0][0])
        assert losses == pytest.approx(expected_losses, rel=RELATIVE)
    assert_close(trained[0][0], expected, "a rank without samples")

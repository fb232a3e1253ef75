"""The encoder of the examples: its masks, its loss, and exact training on unequal ranks.

Tolerances of parameters are those of test_exact_steps.py, with the same eps of 1e-5.
"""

from __future__ import annotations

import math
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

import llama
from encoder import BYTES, MASK, SIZES, Encoder, EncoderConfig, MaskedBytes, masked_byte_loss
from text import ByteWindows

EXAMPLES = Path(llama.__file__).parent

Batch = dict[str, Tensor]

SMALL = EncoderConfig(width=24, layers=2, heads=2, context=32)
ADAM = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.05}


def windows(context: int, count: int = 64) -> ByteWindows:
    """Windows of random bytes, which cannot be predicted from each other."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(BYTES, (count * context + 1,), generator=generator, dtype=torch.uint8)
    return ByteWindows(text, context)


def new_model(config: EncoderConfig = SMALL) -> Encoder:
    """The same weights in every process, large enough that each of them matters."""
    torch.manual_seed(0)
    model = Encoder(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
        else:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def samples(start: int, stop: int, context: int = SMALL.context) -> Batch:
    """A batch of masked windows."""
    data = MaskedBytes(windows(context), seed=3)
    return default_collate([data[index] for index in range(start, stop)])


class TestSizes:
    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"width": 0}, "at least 1"),
            ({"layers": 0}, "at least 1"),
            ({"context": -1}, "at least 1"),
            ({"hidden": -4}, "at least 1"),
            ({"width": 100, "heads": 3}, "width 100 must be a multiple of heads 3"),
            ({"vocabulary": 256}, "vocabulary 256 must be at least 257"),
        ],
    )
    def test_invalid_sizes_raise(self, sizes, message):
        with pytest.raises(ValueError, match=message):
            EncoderConfig(**sizes)

    def test_feed_forward_is_four_times_as_wide_by_default(self):
        assert EncoderConfig(width=64).feed_forward == 256
        assert EncoderConfig(width=64, hidden=100).feed_forward == 100

    def test_sizes_match_the_llama_of_the_same_name(self):
        assert list(SIZES) == list(llama.SIZES)
        for name, config in SIZES.items():
            with torch.device("meta"):
                models = Encoder(config), llama.Llama(llama.SIZES[name])
            own, other = (sum(p.numel() for p in model.parameters()) for model in models)
            assert 1.0 <= own / other < 1.2, name


class TestModel:
    def test_attention_equals_torch(self):
        """torch's own module has a bias for keys; at zero it has no effect."""
        own = new_model().blocks[0].attention
        other = nn.MultiheadAttention(SMALL.width, SMALL.heads, batch_first=True)
        projections = (own.queries, own.keys, own.values)
        other.in_proj_weight.data = torch.cat([layer.weight.data for layer in projections])
        zeros = torch.zeros(SMALL.width)
        other.in_proj_bias.data = torch.cat([own.queries.bias.data, zeros, own.values.bias.data])
        other.out_proj = own.out
        x = torch.randn(3, 9, SMALL.width, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(own(x), other(x, x, x)[0], rtol=1e-5, atol=1e-6)

    def test_attention_is_bidirectional(self):
        model, batch = new_model(), samples(0, 1)
        changed = batch["input"].clone()
        changed[0, -1] = (changed[0, -1] + 1) % BYTES
        first = torch.zeros(1, 1, dtype=torch.long)
        assert not torch.equal(model(changed, first), model(batch["input"], first))

    def test_selected_positions_equal_the_full_output(self):
        model, batch = new_model(), samples(0, 3)
        everywhere = model(batch["input"])
        assert everywhere.shape == (3, SMALL.context, BYTES)
        rows = torch.stack(
            [row[places] for row, places in zip(everywhere, batch["places"], strict=True)]
        )
        asked = model(batch["input"], batch["places"])
        torch.testing.assert_close(asked, rows, rtol=1e-5, atol=1e-6)

    def test_shorter_input_works_and_longer_raises(self):
        model = new_model()
        assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, BYTES)
        with pytest.raises(ValueError, match="33 bytes do not fit the context of 32"):
            model(torch.zeros(1, 33, dtype=torch.long))

    def test_every_parameter_gets_a_gradient_above_rounding(self):
        model = new_model()
        masked_byte_loss(model, samples(0, 16)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.abs().max() > 1e-7, name


class TestMasks:
    def test_masks_depend_only_on_seed_and_index(self):
        data, again = (MaskedBytes(windows(64), seed=1) for _ in range(2))
        backwards = [again[index] for index in reversed(range(len(again)))]
        torch.manual_seed(99)
        for index, sample in enumerate(reversed(backwards)):
            for name, tensor in data[index].items():
                assert torch.equal(tensor, sample[name])

    def test_masks_do_not_change_the_global_random_state(self):
        before = torch.random.get_rng_state()
        MaskedBytes(windows(64))[0]
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_masks_differ_between_samples_and_between_seeds(self):
        drawn = [
            tuple(MaskedBytes(windows(64), seed)[index]["places"].tolist())
            for seed in range(3)
            for index in range(3)
        ]
        assert len(set(drawn)) == len(drawn)

    @pytest.mark.parametrize(("context", "number"), [(1, 1), (5, 1), (20, 3), (64, 10), (100, 15)])
    def test_masks_have_the_same_number_in_every_sample(self, context, number):
        data = MaskedBytes(windows(context))
        for index in range(len(data)):
            sample = data[index]
            assert sample["input"].shape == (context,)
            assert sample["places"].shape == sample["target"].shape == (number,)
            assert sample["places"].unique().numel() == number

    def test_masks_change_only_masked_bytes(self):
        plain = windows(64)
        data = MaskedBytes(plain)
        for index in range(len(data)):
            sample, text = data[index], plain[index]["input"]
            assert torch.equal(sample["target"], text[sample["places"]])
            filled_in = sample["input"].index_put((sample["places"],), sample["target"])
            assert torch.equal(filled_in, text)

    def test_masks_do_not_change_the_text(self):
        plain = windows(64)
        before = plain.digest()
        MaskedBytes(plain)[0]
        assert plain.digest() == before

    def test_masks_replace_bytes_as_bert_does(self):
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


class TestLoss:
    def test_loss_is_the_mean_over_samples(self):
        model = new_model()
        together = masked_byte_loss(model, samples(0, 12))
        alone = [masked_byte_loss(model, samples(index, index + 1)) for index in range(12)]
        torch.testing.assert_close(together, torch.stack(alone).mean(), rtol=1e-6, atol=0)

    def test_loss_is_the_cross_entropy_at_the_masked_places_only(self):
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

    def test_loss_of_a_new_model_is_that_of_random_guesses(self):
        torch.manual_seed(0)
        loss = masked_byte_loss(Encoder(SIZES["tiny"]), samples(0, 16, context=64))
        assert loss.item() == pytest.approx(math.log(BYTES), abs=0.2)

    def test_loss_decreases_in_training(self):
        """Bytes increase by one, so each can be predicted from the adjacent bytes."""
        text = torch.arange(64 * SMALL.context + 1).remainder(16).to(torch.uint8)
        data = MaskedBytes(ByteWindows(text, SMALL.context))
        batch = default_collate([data[index] for index in range(len(data))])
        model = new_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(30):
            loss = masked_byte_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]


def test_command_line_accepts_the_encoder():
    work = load(f"{EXAMPLES}/workload.py:encoder")
    assert work.loss_fn(work.model, work.batch_of(2)).requires_grad


BATCHES = ((0, 12), (12, 24), (24, 36))
"""Start and end of the samples of each step."""

CASES = {
    "uneven batches": ("2,1,3,6", None),
    "a rank without samples": ("5,0,3,4", (0.55, 0.25, 0.0, 0.2)),
}


def train_on_ranks(plan: Plan) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and losses after a few steps on ranks, each with its part of the batch."""
    model = new_model().to(harness.device())
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, process_group=harness.group(), **ADAM
    )
    counts = [plan.samples(rank) for rank in range(plan.world_size)]
    skipped = sum(counts[: harness.rank()])
    losses = []
    for start, _ in BATCHES:
        begin = start + skipped
        own = samples(begin, begin + counts[harness.rank()]) if counts[harness.rank()] else None
        if own is not None:
            own = {name: tensor.to(harness.device()) for name, tensor in own.items()}
        losses.append(float(optimizer.train_step(masked_byte_loss, own).loss))
    return whole_parameters(model, optimizer), losses


def train_alone() -> tuple[dict[str, Tensor], list[float]]:
    """The same steps in this process with plain torch."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for start, stop in BATCHES:
        loss = masked_byte_loss(model, samples(start, stop))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name: p.detach() for name, p in model.named_parameters()}, losses


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_training_on_unequal_ranks_equals_one_process(ranks: Pool, case: str, stage: int) -> None:
    expected, expected_losses = train_alone()
    batches, shares = CASES[case]
    trained = ranks.run(train_on_ranks, Plan.manual(batches, stage=stage, shares=shares))
    for parameters, losses in trained:
        assert_same(parameters, trained[0][0])
        assert losses == pytest.approx(expected_losses, rel=RELATIVE)
    assert_close(trained[0][0], expected, case)

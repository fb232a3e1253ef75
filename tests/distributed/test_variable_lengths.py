"""Training on samples of unequal lengths equals one process, padded or packed, at every stage."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ranks import Pool
from torch import nn
from torch.utils.data import DataLoader

import poplar
from poplar import HeteroBatchSampler, HeteroZeroOptimizer, Plan
from poplar.data import CollateMicroBatches, pytree

WORDS, STEPS = 40, 3
PLANS = {
    0: Plan(
        stage=0, global_batch=12, micro_batches=((1, 2), (3, 3, 1), (), (2,)), shares=(0.25,) * 4
    ),
    3: Plan.manual("2,3,0,1", stage=3, passes=2, shares=(0.5, 0.2, 0.2, 0.1)),
}


class Tagger(nn.Module):
    """Predicts a tag for each token from the tokens up to it, sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.tags = nn.Linear(16, 5)

    def forward(self, ids, starts):
        """`starts`: per token, 1 where a sample starts; sums go back to the last start."""
        sums = self.words(ids).cumsum(1)
        places = torch.arange(ids.shape[1]).expand(ids.shape)
        first = torch.where(starts.bool(), places, 0).cummax(1).values
        before = torch.cat([torch.zeros_like(sums[:, :1]), sums], 1)
        inside = sums - before.gather(1, first.unsqueeze(-1).expand_as(sums))
        return self.tags(inside / (places - first + 1).unsqueeze(-1))


def build() -> Tagger:
    torch.manual_seed(0)
    return Tagger()


def dataset() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(12 * STEPS):
        length = int(torch.randint(1, 20, (), generator=generator))
        ids = torch.randint(1, WORDS, (length,), generator=generator).tolist()
        samples.append(
            {"ids": ids, "starts": [1] + [0] * (length - 1), "labels": [i % 5 for i in ids]}
        )
    return samples


def padded(samples):
    """Every sample to the longest one, as Hugging Face's `DataCollatorWithPadding` does."""
    longest = max(len(own["ids"]) for own in samples)
    padding = {"ids": 0, "starts": 0, "labels": -100}
    return {
        key: torch.tensor([own[key] + [value] * (longest - len(own[key])) for own in samples])
        for key, value in padding.items()
    }


def packed(samples):
    """All samples in one row."""
    return {key: torch.tensor([[v for own in samples for v in own[key]]]) for key in samples[0]}


def token_mean(model, batch):
    outputs = model(batch["ids"], batch["starts"])
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def train(plan, collate, grouped):
    data, model = dataset(), build()
    lengths = [len(sample["ids"]) for sample in data]
    sampler = HeteroBatchSampler(len(data), plan, lengths=lengths, group_by_length=grouped)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=CollateMicroBatches(collate, plan))
    optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=1e-2)
    weight = poplar.tokens(shift=False)
    losses = [float(optimizer.train_step(token_mean, b, weight=weight).loss) for b in loader]
    with optimizer.full_parameters():
        return losses, [parameter.detach().clone() for parameter in model.parameters()]


def train_one_process(grouped):
    data, model = dataset(), build()
    lengths = [len(sample["ids"]) for sample in data]
    plan = Plan.manual("12", stage=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    sampler = HeteroBatchSampler(len(data), plan, rank=0, lengths=lengths, group_by_length=grouped)
    for indices in sampler:
        loss = token_mean(model, padded([data[at] for at in indices]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("stage", "collate", "grouped"), [(0, padded, True), (0, packed, False), (3, packed, True)]
)
def test_training_equals_one_process(ranks: Pool, stage, collate, grouped):
    expected = train_one_process(grouped)
    for found in ranks.run(partial(train, grouped=grouped), PLANS[stage], collate):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def hugging_face_tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(WORDS)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")


def train_with_hugging_face(plan):
    from transformers import DataCollatorForTokenClassification

    data, model = dataset(), build()
    data = [{"input_ids": own["ids"], "labels": own["labels"]} for own in data]

    def loss_fn(model, batch):
        starts = torch.zeros_like(batch["input_ids"])
        return token_mean(model, {"ids": batch["input_ids"], "starts": starts, **batch})

    sampler = HeteroBatchSampler(len(data), plan, lengths=[len(o["labels"]) for o in data])
    collate = CollateMicroBatches(
        DataCollatorForTokenClassification(hugging_face_tokenizer()), plan
    )
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=1e-2)
    weight = poplar.tokens(shift=False)
    return [float(optimizer.train_step(loss_fn, b, weight=weight).loss) for b in loader]


def test_training_with_a_collator_of_hugging_face_equals_one_process(ranks: Pool):
    pytest.importorskip("transformers")
    expected, _ = train_one_process(False)
    for losses in ranks.run(train_with_hugging_face, PLANS[0]):
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_collators_of_hugging_face_pad_or_pack_each_micro_batch():
    transformers = pytest.importorskip("transformers")
    plan = Plan(stage=0, global_batch=3, micro_batches=((2, 1),), shares=(1.0,))
    samples = [{"input_ids": [1] * length} for length in (5, 4, 2)]
    padding = transformers.DataCollatorWithPadding(hugging_face_tokenizer())
    packing = transformers.DataCollatorWithFlattening(return_tensors="pt")
    for collate, shapes in ((padding, [(2, 5), (1, 2)]), (packing, [(1, 9), (1, 2)])):
        batch = CollateMicroBatches(collate, plan)(samples)
        assert pytree.samples_in(batch) == 3
        parts = pytree.split(batch, plan.micro_batches[0])
        assert [tuple(part["input_ids"].shape) for part in parts] == shapes


def retry_smaller(plan):
    """Running out of memory once collates smaller micro-batches of the same samples."""
    data, model = dataset(), build()
    lengths = [len(sample["ids"]) for sample in data]
    sampler = HeteroBatchSampler(len(data), plan, lengths=lengths)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=CollateMicroBatches(padded, plan))
    optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=1e-2)

    def loss_fn(model, batch):
        if len(batch["ids"]) > 2:
            raise torch.OutOfMemoryError("more than two samples")
        return token_mean(model, batch)

    weight = poplar.tokens(shift=False)
    return [float(optimizer.train_step(loss_fn, b, weight=weight).loss) for b in loader]


@pytest.mark.filterwarnings("ignore:.*memory.*")
def test_smaller_micro_batches_after_running_out_of_memory(ranks: Pool):
    expected, _ = train_one_process(False)
    for losses in ranks.run(retry_smaller, PLANS[0]):
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


# The profile


def tuned(folder, tokens, lengths, *, on_rank_1=None, **options):
    """`poplar.tune` with an example that is padded to so many tokens."""
    if torch.distributed.get_rank() == 1 and on_rank_1 is not None:
        lengths = on_rank_1
    example = {
        "ids": torch.ones(2, tokens, dtype=torch.long),
        "starts": torch.ones(2, tokens),
        "labels": torch.ones(2, tokens, dtype=torch.long),
    }
    small = {"global_batch": 12, "max_batch": 4, "seconds": 0.5, "stage": 2, "progress": False}
    given = {**small, "weight": poplar.tokens(shift=False), "lengths": lengths, **options}
    return poplar.tune(build(), token_mean, example, cache=folder, **given)


def error_of(*arguments, **options):
    try:
        tuned(*arguments, **options)
    except (ValueError, poplar.PoplarError) as error:
        return str(error)
    return "no error"


def test_profile_is_of_the_lengths_and_not_of_the_padding(ranks: Pool, tmp_path):
    lengths = [3, 5, 5, 8, 30]
    first = ranks.run(tuned, str(tmp_path), 7, lengths)[0]
    assert first.observations
    assert "5 samples of 3 to 30" in first.profile.identity["length_distribution"]
    assert type(first.profile).from_dict(first.profile.to_dict()) == first.profile
    again = ranks.run(tuned, str(tmp_path), 19, lengths)[0]
    assert again.plan == first.plan
    assert again.observations == ()  # from the cache
    for message in ranks.run(error_of, False, 7, None, profile=first.profile):
        assert (
            "the profile is of another length distribution: measured '5 samples of 3 to 30"
            in message
        )


def test_wrong_lengths_on_one_rank_raise_on_all_ranks(ranks: Pool):
    for wrong, expected in (([0], "finite numbers above 0"), ([1, 2], "lengths")):
        messages = ranks.run(error_of, False, 3, [1, 2, 3], on_rank_1=wrong)
        assert all(expected in message for message in messages), messages

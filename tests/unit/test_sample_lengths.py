"""Passes are measured at the lengths to which micro-batches of a dataset are padded."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import graphs
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from poplar.data import CollateMicroBatches, pytree
from poplar.data.lengths import SampleLengths, at_length, padded_length
from poplar.data.micro_batch_collation import MicroBatches
from poplar.profiler.job import UNKNOWN_SIZE, Job
from poplar.profiler.passes import Passes
from poplar.values.plan import Plan

CPU = torch.device("cpu")
some_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=5)


# The longest of a few samples


@given(lengths=some_lengths, samples=st.integers(1, 4))
def test_typical_length_is_the_expected_longest(lengths, samples):
    every_draw = [max(drawn) for drawn in product(lengths, repeat=samples)]
    typical = SampleLengths(lengths, 0.9).typical(samples)
    assert typical - 1 < fmean(every_draw) + 1e-6
    assert fmean(every_draw) <= typical + 1e-6


@given(lengths=some_lengths, samples=st.integers(1, 4), quantile=st.sampled_from([0.5, 0.9, 0.99]))
def test_few_micro_batches_are_longer_than_the_quantile(lengths, samples, quantile):
    every_draw = [max(drawn) for drawn in product(lengths, repeat=samples)]
    longest = SampleLengths(lengths, quantile).longest(samples)

    def part_up_to(length):
        return fmean(drawn <= length for drawn in every_draw)

    assert part_up_to(longest) >= quantile - 1e-6
    shorter = max((length for length in lengths if length < longest), default=0)
    assert part_up_to(shorter) < quantile + 1e-6


def test_larger_micro_batches_are_longer():
    lengths = SampleLengths(range(1, 1001), 0.99)
    assert [lengths.typical(size) for size in (1, 3, 999)] == [501, 751, 1000]
    assert [lengths.longest(size) for size in (1, 10, 10_000)] == [990, 999, 1000]


# Batches of these lengths


def test_a_batch_is_cut_or_repeated_to_a_length():
    batch = {"ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "other": torch.zeros(2, 5), "sum": [1, 2]}
    batch["ids"] = torch.cat([batch["ids"], batch["ids"] + 6], dim=1)
    assert padded_length(batch) == 6
    assert at_length(batch, 6) is batch
    assert at_length(batch, 2)["ids"].tolist() == [[1, 2], [4, 5]]
    assert at_length(batch, 8)["ids"].tolist()[0] == [1, 2, 3, 7, 8, 9, 1, 2]
    assert at_length(batch, 8)["other"].shape == (2, 5)
    assert at_length(batch, 8)["sum"] == [1, 2]


@pytest.mark.parametrize("length", [1, 3, 9])
def test_lengths_of_samples_in_a_batch_change_with_it(length):
    batch = {
        "sound": torch.randn(3, 6, 2),
        "frames": torch.tensor([6, 2, 5]),
        "labels": torch.tensor([1, 0, 7]),
        "words": torch.tensor([2, 2, 1], dtype=torch.int32),
    }
    resized = at_length(batch, length)
    torch.nn.utils.rnn.pack_padded_sequence(
        resized["sound"], resized["frames"], batch_first=True, enforce_sorted=False
    )
    assert int(resized["frames"].max()) == length
    assert resized["labels"] is batch["labels"]
    assert resized["words"] is batch["words"]


class Words(nn.Module):
    """Activations in proportion to the padded tokens; keeps the shapes that it saw."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = []

    def forward(self, ids):
        self.seen.append(tuple(ids.shape))
        return (ids.float() * self.weight).square().mean()


def words_loss(model, batch):
    return model(batch["ids"])


@pytest.fixture
def passes():
    example = {"ids": torch.arange(24).view(2, 12)}
    lengths = SampleLengths([4] * 90 + [8] * 9 + [20], 0.99)
    return Passes(Words(), words_loss, example, CPU, lengths=lengths)


def test_times_are_of_typical_and_memory_is_of_long_micro_batches(passes):
    passes.seconds(3)
    assert set(passes.model.seen) == {(3, passes.lengths.typical(3))}
    passes.model.seen.clear()
    held = passes.first(3).activation_bytes
    assert passes.model.seen[-1] == (3, 20)
    assert passes.lengths.typical(3) < 8
    shorter = replace(passes, lengths=SampleLengths([10], 0.95), _batches={})
    assert held == pytest.approx(2 * shorter.first(3).activation_bytes, rel=0.1)


def test_micro_batches_of_a_trial_step_have_their_own_lengths(passes):
    batch = passes.step_batch(5)
    assert pytree.samples_in(batch) == 5
    parts = pytree.split(batch, (1, 0, 4))
    assert parts[1] is None
    shapes = [tuple(part["ids"].shape) for part in (parts[0], parts[2])]
    assert shapes == [(size, passes.lengths.typical(size)) for size in (1, 4)]


def test_without_lengths_the_example_is_repeated_as_it_is(passes):
    plain = replace(passes, lengths=None, _batches={})
    plain.first(3)
    assert set(plain.model.seen) == {(3, 12)}
    assert torch.equal(plain.step_batch(4)["ids"], plain.batch(4)["ids"])


def test_micro_batches_of_a_trial_step_are_collated_one_by_one(passes):
    samples = [torch.full((3, 2), float(place)) for place in range(3)]
    example = MicroBatches(samples, (), torch.cat)
    packed = replace(passes, example=example, lengths=None, _batches={})
    batch = packed.step_batch(5)
    assert pytree.samples_in(batch) == 5
    parts = pytree.split(batch, (1, 0, 4))
    assert parts[1] is None
    assert [tuple(part.shape) for part in (parts[0], parts[2])] == [(3, 2), (12, 2)]


def takes_ids(model, batch):
    return model(batch.pop("ids"))


@pytest.mark.parametrize("lengths", [True, False])
def test_a_loss_may_take_something_out_of_its_batch(passes, lengths):
    given = passes.lengths if lengths else None
    measured = replace(passes, loss_fn=takes_ids, lengths=given, _batches={})
    measured.check()
    measured.first(2)
    measured.parts(2)
    for _ in range(2):
        for part in pytree.split(measured.step_batch(4), (2, 2)):
            takes_ids(measured.model, part)


def test_a_model_may_write_to_an_object_in_its_batch():
    example = CollateMicroBatches(graphs.as_object)(graphs.dataset(3))
    measured = Passes(graphs.Network(), graphs.mean_over_graphs, example, CPU)
    measured.check()
    measured.first(4)
    measured.parts(4)
    for _ in range(2):
        for part in pytree.split(measured.step_batch(4), (2, 2)):
            graphs.mean_over_graphs(measured.model, part)


# Jobs


def job_of(**options) -> Job:
    given = {"example": {"ids": torch.zeros(2, 12)}, **options}
    return Job.of(Words(), words_loss, **given)


def entry_of(example, **options):
    """What the identity of a profile says about its example."""
    return job_of(example=example, **options).may_differ(CPU)["example"]


def test_padding_of_the_example_is_no_part_of_the_identity_with_lengths():
    def example_entry(tokens, **options):
        return entry_of({"ids": torch.zeros(2, tokens)}, **options)

    assert example_entry(12) != example_entry(15)
    assert example_entry(12, lengths=[3, 12]) == example_entry(15, lengths=[3, 12])


def jagged(samples):
    sizes = torch.tensor([len(sample.x) for sample in samples])
    return {"values": torch.cat([s.x for s in samples]), "offsets": sizes.cumsum(0)}


def nested(samples):
    return torch.nested.as_nested_tensor([sample.x for sample in samples], layout=torch.jagged)


def sparse(samples):
    return [torch.eye(len(sample.x)).to_sparse() for sample in samples]


def arrays(samples):
    return {"points": [sample.x.numpy() for sample in samples]}


def beside_rows(samples):
    return {"y": torch.cat([s.y for s in samples]), "graphs": graphs.as_object(samples)}


@pytest.mark.parametrize(
    "collate",
    [graphs.as_object, graphs.as_dict, beside_rows, jagged, nested, sparse, arrays, list],
)
def test_sizes_of_samples_that_are_no_rows_are_part_of_the_identity(collate):
    def entry(samples):
        return entry_of(CollateMicroBatches(collate)(samples))

    small, large = graphs.dataset(3, nodes=4), graphs.dataset(3, nodes=16)
    assert entry(small) == entry(graphs.dataset(3, nodes=4, seed=1))
    assert entry(small) == entry([*small, *small])
    assert entry(small) != entry(large)
    assert entry(small) != entry(small[:2])
    assert len(entry(graphs.dataset(50) + graphs.dataset(50, nodes=16))) < 100, "it is in messages"


def test_an_example_that_was_not_collated_has_the_same_identity():
    example = CollateMicroBatches(graphs.as_dict)(graphs.dataset(3))
    assert entry_of(example) == entry_of(pytree.select(example, range(3)))


@pytest.mark.parametrize("collate", [lambda _: graphs.Graphs(x=lambda: None), list])
def test_objects_without_pickles_and_samples_without_tensors_are_of_unknown_size(collate):
    assert UNKNOWN_SIZE in entry_of(CollateMicroBatches(collate)(["some", "text"]))


def test_only_tensors_and_arrays_have_sizes():
    first, second = ({"x": torch.ones(2, 3), "of": [Path(name)] * 2} for name in ("a", "b.png"))
    assert entry_of(first) == entry_of(second) == "[3]:torch.float32"


def test_arrays_beside_rows_are_part_of_the_identity():
    def entry(samples, size):
        images = numpy.zeros((samples, 3, size, size))
        return entry_of({"y": torch.zeros(samples), "images": images})

    assert entry(4, 8) == entry(2, 8)
    assert entry(4, 8) != entry(4, 16)


def test_lengths_of_strings_are_no_part_of_the_identity():
    def entry(name):
        def named(samples):
            return {**graphs.as_dict(samples), "names": numpy.array([name])}

        return entry_of(CollateMicroBatches(named)(graphs.dataset(3)))

    assert entry("a") == entry("a longer name")


@pytest.mark.parametrize("plan", [None, Plan.manual("2,2", stage=0)], ids=["no plan", "plan"])
@pytest.mark.parametrize("extra", [dict, lambda: {"points": numpy.ones(2)}], ids=["rows", "arrays"])
def test_a_random_collate_function_does_not_change_the_random_state(plan, extra):
    def masked(samples):
        rows = torch.stack(samples)
        return {"ids": rows * torch.bernoulli(torch.full_like(rows, 0.5)), **extra()}

    example = CollateMicroBatches(masked, plan, rank=0)([torch.ones(4)] * 4)
    before = torch.get_rng_state()
    job = job_of(example=example)
    job.check()
    job.may_differ(CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_of_tensors_are_not_collated_sample_by_sample():
    calls = []

    def collate(samples):
        calls.append(len(samples))
        return torch.stack(samples)

    example = CollateMicroBatches(collate)([torch.ones(4)] * 64)
    job = job_of(example=example)
    job.check()
    job.may_differ(CPU)
    assert calls == [64]


def test_lengths_leave_alone_samples_that_are_no_rows():
    samples = graphs.dataset(4)
    job = job_of(example=CollateMicroBatches(graphs.as_dict)(samples), lengths=[1, 2])
    job.check()
    assert job.measured_lengths is None
    padded = CollateMicroBatches(lambda rows: {"ids": torch.stack(rows)})
    rows = job_of(example=padded([torch.ones(5)] * 3), lengths=[2, 6])
    rows.check()
    assert rows.measured_lengths is not None


def test_lengths_are_part_of_the_identity():
    def entry(*lengths, quantile=0.99):
        job = job_of(lengths=lengths, length_quantile=quantile)
        return job.must_be_equal()["lengths"]

    assert entry(3, 12) == entry(12, 3)
    assert len({entry(3, 12), entry(3, 13), entry(3, 12, quantile=0.9)}) == 3
    assert "2 samples of 3 to 12, mean 7.5, memory at quantile 0.99" in entry(3, 12)
    assert job_of().must_be_equal()["lengths"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [0, 1]}, "finite numbers above 0"),
        ({"lengths": torch.ones(2, 2)}, "must have one dimension"),
        ({"lengths": [1], "length_quantile": 1.0}, "length_quantile must be above 0 and below 1"),
        ({"lengths": [1], "example": torch.zeros(3)}, "tensors of the shape \\[samples, length"),
        ({"lengths": [0.5, 2.5], "example": torch.zeros(3, 6)}, "not in seconds"),
        ({"lengths": [300, 900], "example": torch.zeros(3, 80, 500)}, "longest dim 1 .* is 80"),
        (
            {"lengths": [0], "example": CollateMicroBatches(graphs.as_dict)(graphs.dataset(2))},
            "finite numbers above 0",
        ),
    ],
)
def test_wrong_lengths_raise(options, message):
    with pytest.raises(ValueError, match=message):
        job_of(**options).check()

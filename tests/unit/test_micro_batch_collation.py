"""Micro-batches that are collated one by one, and the warning where lengths are not balanced."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings

import graphs
import pytest
import torch
from torch.utils.data import DataLoader

from poplar.data import CollateMicroBatches, HeteroBatchSampler, pytree
from poplar.values.plan import Plan
from poplar.zero.checks.first_batches import FirstBatches

SAMPLES = [list(range(1, 1 + length)) for length in (9, 2, 7, 5, 3, 4, 8, 6)]
LENGTHS = [len(sample) for sample in SAMPLES]
PLAN = Plan(stage=0, global_batch=8, micro_batches=((2, 3), (3,)), shares=(0.5, 0.5))


def padded(samples):
    """The simplest collate function: 0 after the end of each sample."""
    longest = max(map(len, samples))
    return {"ids": torch.tensor([[*own, *[0] * (longest - len(own))] for own in samples])}


def packed(samples):
    """All samples in one row."""
    return {"ids": torch.tensor([[word for own in samples for word in own]])}


def loaded(rank, collate, **options):
    sampler = HeteroBatchSampler(8, PLAN, rank=rank, lengths=LENGTHS, shuffle=False)
    (batch,) = DataLoader(
        SAMPLES,
        batch_sampler=sampler,
        collate_fn=CollateMicroBatches(collate, PLAN, rank),
        **options,
    )
    return batch


def words_of(micro_batches):
    return sorted(int(word) for part in micro_batches for word in part["ids"].flatten() if word)


@pytest.mark.parametrize("workers", [0, 1])
def test_each_micro_batch_is_padded_to_its_own_longest_sample(workers):
    batches = [loaded(rank, padded, num_workers=workers) for rank in (0, 1)]
    parts = [pytree.split(batch, PLAN.micro_batches[rank]) for rank, batch in enumerate(batches)]
    assert [[list(part["ids"].shape) for part in own] for own in parts] == [
        [[2, 9], [3, 4]],
        [[3, 7]],
    ]
    assert words_of([*parts[0], *parts[1]]) == sorted(word for sample in SAMPLES for word in sample)


def test_what_a_loss_takes_out_of_a_micro_batch_is_there_again_after_another_split():
    batch = loaded(0, padded)
    for sizes in ((2, 3), (2, 2, 1)):  # the first micro-batch stays
        for part in pytree.split(batch, sizes):
            part.pop("ids")


def test_packed_samples_are_counted_before_they_are_packed():
    batch = loaded(0, packed)
    assert pytree.samples_in(batch) == 5
    assert [part["ids"].shape[0] for part in pytree.split(batch, (2, 3))] == [1, 1]


def test_what_a_model_writes_to_an_object_is_not_in_later_copies_of_it():
    batch = CollateMicroBatches(graphs.as_object)(graphs.dataset(5))
    model, losses = graphs.Network(), []
    for _ in range(2):  # as after running out of memory elsewhere in the step
        (part,) = pytree.split(batch, (5,))
        losses.append(float(graphs.mean_over_graphs(model, part).detach()))
    assert losses[0] == losses[1]


def test_objects_are_moved_and_pinned_also_in_later_micro_batches():
    batch = CollateMicroBatches(graphs.as_object)(graphs.dataset(5))
    moved = batch.to("meta", non_blocking=True)
    for sizes in ((5,), (2, 3)):
        assert {part.x.device.type for part in pytree.split(moved, sizes)} == {"meta"}
        assert {part.x.device.type for part in pytree.split(batch, sizes)} == {"cpu"}
    (part,), (pinned,) = batch.split((5,)), batch.pin_memory().split((5,))
    assert pinned.x is not part.x  # its method was called
    assert pinned.y is part.y


def test_other_sizes_are_collated_from_the_samples():
    batch = loaded(0, padded)
    first, second, third = pytree.split(batch, (1, 3, 1))
    assert [part["ids"].shape[0] for part in (first, second, third)] == [1, 3, 1]
    assert words_of([first, second, third]) == words_of(pytree.split(batch, (2, 3)))
    assert pytree.take(batch, [4])["ids"].tolist() == third["ids"].tolist()
    assert pytree.split(batch, (0, 5))[0] is None
    with pytest.raises(ValueError, match="5 samples cannot be split into"):
        pytree.split(batch, (2, 2))


def test_a_batch_that_was_moved_collates_later_micro_batches_there():
    moved = loaded(0, padded).to("meta")
    assert {tensor.device.type for tensor in pytree.tensors(moved)} == {"meta"}
    (later,) = pytree.split(moved, (5,))
    assert later["ids"].device.type == "meta"


def test_a_micro_batch_is_collated_once():
    collated = []

    def collate(samples):
        collated.append(len(samples))
        return padded(samples)

    batch = CollateMicroBatches(collate, PLAN, rank=0)(SAMPLES[:5])
    pytree.split(batch, (2, 3))
    pytree.split(batch, (2, 3))
    assert collated == [2, 3]


def test_no_collate_function_leaves_a_worker():
    batch = loaded(0, lambda samples: padded(samples), num_workers=1, timeout=20)
    assert [len(part["ids"]) for part in pytree.split(batch, (4, 1))] == [4, 1]


class CountsCopies:
    """A collate function whose result says how often it has been pickled."""

    pickled = 0

    def __call__(self, samples):
        return padded(samples) | {"pickled": torch.tensor(self.pickled)}

    def __getstate__(self):
        return {"pickled": self.pickled + 1}


def test_a_spawned_worker_gets_the_collate_function_and_does_not_return_it():
    options = {"num_workers": 1, "timeout": 60, "multiprocessing_context": "spawn"}
    batch = loaded(0, CountsCopies(), **options)
    planned, other = batch.split((2, 3)), batch.take([0])
    assert [int(part["pickled"]) for part in planned] == [1, 1]
    assert int(other["pickled"]) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_batches_and_collators_collate_with_the_same_function(copied):
    collate = CollateMicroBatches(padded, PLAN, 0)
    other = copied(collate)
    batch = copied(other(SAMPLES[:5]))
    del collate
    assert [len(part["ids"]) for part in pytree.split(batch, (4, 1))] == [4, 1]


def test_an_unpickled_batch_without_its_collator_has_the_planned_micro_batches():
    batch = pickle.loads(pickle.dumps(CollateMicroBatches(padded, PLAN, 0)(SAMPLES[:5])))
    assert [len(part["ids"]) for part in pytree.split(batch, (2, 3))] == [2, 3]
    with pytest.raises(RuntimeError, match="keep the CollateMicroBatches while"):
        pytree.split(batch, (4, 1))


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_plan_all_samples_are_one_micro_batch_until_they_are_split(workers):
    collate = CollateMicroBatches(padded)
    (batch,) = DataLoader(SAMPLES, batch_size=8, collate_fn=collate, num_workers=workers)
    assert [list(tensor.shape) for tensor in pytree.tensors(batch)] == [[8, 9]]
    assert [list(part["ids"].shape) for part in pytree.split(batch, (3, 5))] == [[3, 9], [5, 8]]


def test_selected_samples_are_collated_when_they_are_split():
    batch = CollateMicroBatches(padded)(SAMPLES).to("meta")
    selected = pytree.select(batch, [1, 1, 0])
    assert pytree.samples_in(selected) == 3
    assert pytree.tensors(selected) == []
    parts = pytree.split(selected, (2, 1))
    assert [list(part["ids"].shape) for part in parts] == [[2, 2], [1, 9]]
    assert {tensor.device.type for tensor in pytree.tensors(parts)} == {"meta"}


def test_a_placeholder_is_not_collated():
    plan = Plan.manual("0,8", stage=0)
    batch = CollateMicroBatches(padded, plan, rank=0)(SAMPLES[:1])
    assert pytree.tensors(batch) == []
    assert pytree.samples_in(batch) == 1


# The warning


def looked_at(*lengths):
    """What a rank is told after batches that are padded to these lengths."""
    gc.collect()  # samplers of other tests
    watch = FirstBatches(None, looks=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in lengths:
            watch.look_at_lengths({"ids": torch.zeros(2, length), "weight": torch.zeros(2)})
    return [str(warning.message) for warning in caught]


def test_changing_lengths_give_one_warning():
    (message,) = looked_at(100, 104, 130, 200, 60)
    assert "padded to 100 to 130 tokens" in message
    assert "pass lengths=" in message


def test_nearly_equal_lengths_and_later_steps_give_no_warning():
    assert looked_at(100, 115, 108) == []
    assert looked_at(*[100] * 16, 200) == []


def test_no_warning_with_lengths_in_the_sampler():
    sampler = HeteroBatchSampler(8, PLAN, rank=0, lengths=LENGTHS)
    next(iter(sampler))
    assert looked_at(100, 200) == []


def test_batches_without_lengths_give_no_warning():
    watch = FirstBatches(None, looks=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (None, torch.zeros(3), [torch.zeros(2), "text"]):
            watch.look_at_lengths(batch)


def warned_of(collate, *samples):
    gc.collect()  # samplers of other tests
    watch = FirstBatches(None, looks=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in samples:
            watch.look_at_lengths(CollateMicroBatches(collate)(each))
    return [str(warning.message) for warning in caught]


def test_the_edges_of_graphs_are_no_padded_lengths():
    assert warned_of(graphs.as_dict, graphs.dataset(4), graphs.dataset(4, nodes=20)) == []
    assert warned_of(packed, SAMPLES[:2], SAMPLES) == []
    (message,) = warned_of(padded, SAMPLES[1:4], SAMPLES[:2])
    assert "padded to 7 to 9 tokens" in message

"""Step k is the same global batch for every plan, and training resumes where it stopped."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from poplar.data import HeteroBatchSampler, split_stream
from poplar.values.plan import Plan

PLANS = (
    Plan.even(4, 12, 3, stage=0),
    Plan.manual("1,2,3,6", stage=0),
    Plan.manual("0,12,0,0", stage=2),
    Plan.proportional([5, 1, 1, 0], 12, 3, max_micro_batch=2),
)
batch_sizes = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)


def samplers(length, plan, **options):
    return [
        HeteroBatchSampler(length, plan, rank=rank, **options) for rank in range(plan.world_size)
    ]


def one_epoch(samplers):
    """What all ranks draw in each step, without the placeholder of ranks without samples."""

    steps = zip(*samplers, strict=True)
    plan = samplers[0]._plan
    return [
        [index for rank, part in enumerate(parts) if plan.samples(rank) for index in part]
        for parts in steps
    ]


class Squares(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(index**2)


# The same global batch


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_step_is_the_same_global_batch_for_every_plan(shuffle, drop_last):
    epochs = [
        one_epoch(samplers(40, plan, seed=3, shuffle=shuffle, drop_last=drop_last))
        for plan in PLANS
    ]
    assert all(epoch == epochs[0] for epoch in epochs)
    assert [len(step) for step in epochs[0]] == [12, 12, 12] + [4] * (not drop_last)


@given(sizes=batch_sizes, length=st.integers(1, 60), seed=st.integers(0, 5))
def test_epoch_has_every_sample_once(sizes, length, seed):
    plan = Plan.manual(sizes, stage=2)
    working = sum(size > 0 for size in sizes)
    if 0 < length % plan.global_batch < working:
        length -= length % plan.global_batch
    if length == 0:
        length = plan.global_batch
    drawn = one_epoch(samplers(length, plan, seed=seed, drop_last=False))
    assert sorted(index for step in drawn for index in step) == list(range(length))
    assert [len(step) for step in drawn[:-1]] == [plan.global_batch] * (len(drawn) - 1)


def test_each_rank_draws_its_planned_samples():
    plan = Plan.manual("1,2,3,6", stage=0)
    drawn = [list(sampler) for sampler in samplers(24, plan, shuffle=False)]
    assert drawn[1] == [[1, 2], [13, 14]]
    assert [[len(batch) for batch in rank] for rank in drawn] == [[1, 1], [2, 2], [3, 3], [6, 6]]


def test_rank_without_samples_draws_a_placeholder():
    sampler = HeteroBatchSampler(24, Plan.manual("0,12", stage=0), rank=0, shuffle=False)
    assert list(sampler) == [[0], [12]]


def test_order_depends_only_on_seed_and_epoch():
    def order(seed, epoch):
        sampler = HeteroBatchSampler(30, Plan.manual("30", stage=0), seed=seed)
        sampler.set_epoch(epoch)
        return tuple(next(iter(sampler)))

    assert order(0, 0) == order(0, 0)
    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    torch.manual_seed(1)
    state = torch.get_rng_state()
    order(0, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_length_is_the_number_of_steps():
    plan = Plan.manual("4,8", stage=0)
    assert len(HeteroBatchSampler(40, plan, rank=0)) == 3
    assert len(HeteroBatchSampler(40, plan, rank=0, drop_last=False)) == 4


# Epochs


def test_iteration_after_finished_epoch_is_the_next_epoch():
    sampler = HeteroBatchSampler(24, Plan.manual("12", stage=0))
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sampler.epoch == 1
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler) == second


def test_iteration_after_unfinished_epoch_repeats_it():
    sampler = HeteroBatchSampler(24, Plan.manual("12", stage=0))
    peeked = next(iter(sampler))
    assert next(iter(sampler)) == peeked
    assert sampler.epoch == 0


# Resuming


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("stop", [0, 1, 4, 5, 7, 10])
@pytest.mark.parametrize("drop_last", [True, False])
def test_training_resumes_where_it_stopped(stop, drop_last):
    plan, other_plan = Plan.manual("2,6", stage=0), Plan.manual("5,0,3", stage=0)

    def endless(sampler):
        while True:
            yield from sampler

    def drawn(plan, steps, state=None):
        ranks = samplers(44, plan, seed=1, drop_last=drop_last)
        if state is not None:
            for sampler in ranks:
                sampler.load_state_dict(through_json(state))
        steps = list(islice(zip(*map(endless, ranks), strict=True), steps))
        steps = [
            [i for rank, part in enumerate(parts) if plan.samples(rank) for i in part]
            for parts in steps
        ]
        return steps, ranks[0].state_dict()

    whole, _ = drawn(plan, 14)
    before, state = drawn(plan, stop)
    after, _ = drawn(other_plan, 14 - stop, state)
    assert before + after == whole


def test_set_epoch_keeps_the_resumed_position():
    plan = Plan.manual("12", stage=0)
    sampler = HeteroBatchSampler(48, plan)
    sampler.set_epoch(3)
    whole = list(sampler)
    resumed = HeteroBatchSampler(48, plan)
    resumed.load_state_dict(sampler.state_dict(steps_done=1))
    resumed.set_epoch(3)
    assert list(resumed) == whole[1:]
    resumed.set_epoch(3)
    assert list(resumed) == whole


def test_a_look_at_the_data_keeps_the_resumed_position():
    whole, resumed = (HeteroBatchSampler(48, Plan.manual("12", stage=0)) for _ in range(2))
    expected = list(whole)
    resumed.load_state_dict({**whole.state_dict(), "epoch": 0, "step": 1})
    next(iter(resumed))
    resumed.set_epoch(0)
    assert list(resumed) == expected[1:]


def test_resumed_epoch_left_early_restarts_where_it_was_resumed():
    plan = Plan.manual("12", stage=0)
    sampler = HeteroBatchSampler(48, plan)
    whole = list(sampler)
    resumed = HeteroBatchSampler(48, plan)
    resumed.load_state_dict({**sampler.state_dict(), "epoch": 0, "step": 2})
    assert next(iter(resumed)) == whole[2]
    assert list(resumed) == whole[2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_with_workers_resumes_by_steps_done(workers):
    plan = Plan.manual("2,2", stage=0)
    sampler = HeteroBatchSampler(40, plan, rank=1)
    loader = DataLoader(Squares(), batch_sampler=sampler, num_workers=workers)
    batches = [batch.tolist() for batch in islice(loader, 3)]
    resumed = HeteroBatchSampler(40, plan, rank=1)
    resumed.load_state_dict(sampler.state_dict(steps_done=3))
    loader = DataLoader(Squares(), batch_sampler=resumed, num_workers=workers)
    batches += [batch.tolist() for batch in loader]
    expected = HeteroBatchSampler(40, plan, rank=1)
    assert batches == [[index**2 for index in part] for part in expected]


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 41}, "saved with length=40, but here it is 41"),
        ({"seed": 1}, "saved with seed=0, but here it is 1"),
        ({"shuffle": False}, "saved with shuffle=True, but here it is False"),
        ({"plan": Plan.manual("8", stage=0)}, "saved with global_batch=4, but here it is 8"),
    ],
)
def test_state_of_other_data_raises(options, message):
    state = HeteroBatchSampler(40, Plan.manual("4", stage=0)).state_dict()
    options = {"length": 40, "plan": Plan.manual("4", stage=0), **options}
    with pytest.raises(ValueError, match=message):
        HeteroBatchSampler(**options).load_state_dict(state)


def test_state_of_another_class_raises():
    sampler = HeteroBatchSampler(40, Plan.manual("4", stage=0))
    with pytest.raises(ValueError, match="not a state of HeteroBatchSampler"):
        sampler.load_state_dict({"epoch": 1})
    with pytest.raises(ValueError, match="state format 9"):
        sampler.load_state_dict({**sampler.state_dict(), "version": 9})
    with pytest.raises(ValueError, match="at step 10 of an epoch, but an epoch has 10 steps"):
        sampler.load_state_dict({**sampler.state_dict(), "step": 10})
    with pytest.raises(ValueError, match="between 0 and the 10 steps of an epoch, got 11"):
        sampler.state_dict(steps_done=11)


def test_too_short_last_batch_raises_at_construction():
    plan = Plan.manual("2,2,0,2", stage=0)
    for rank in range(4):
        with pytest.raises(ValueError, match=r"14 samples, .* has 2 .* 3 ranks .* by 1 samples"):
            HeteroBatchSampler(14, plan, rank=rank, drop_last=False)
        assert len(HeteroBatchSampler(14, plan, rank=rank)) == 2


def test_length_is_checked():
    with pytest.raises(ValueError, match="length must be at least 0, got -5"):
        HeteroBatchSampler(-5, Plan.manual("12", stage=0))
    with pytest.raises(TypeError, match="length must be a whole number, got 24"):
        HeteroBatchSampler(24.0, Plan.manual("12", stage=0))


@pytest.mark.parametrize("length", [0, 11])
def test_dataset_smaller_than_a_global_batch_raises(length):
    with pytest.raises(ValueError, match=f"{length} samples gives no step: the global batch is 12"):
        HeteroBatchSampler(length, Plan.manual("12", stage=0))


def test_missing_or_unknown_rank_raises():
    plan = Plan.manual("2,2", stage=0)
    for make in (lambda **rank: HeteroBatchSampler(8, plan, **rank), _first_samples(plan)):
        with pytest.raises(ValueError, match=r"2 ranks and torch\.distributed is not init"):
            make()
        with pytest.raises(ValueError, match="rank 2: the plan is for ranks 0 to 1"):
            make(rank=2)


def _first_samples(plan):
    return lambda **rank: split_stream(range(8), plan, **rank)


def test_default_rank_is_that_of_the_process(ranks):
    drawn = ranks.run(_draw_with_default_rank, Plan.manual("1,2,3,6", stage=0))
    assert drawn == [[[0]], [[1, 2]], [[3, 4, 5]], [[6, 7, 8, 9, 10, 11]]]


def _draw_with_default_rank(plan):
    return list(HeteroBatchSampler(12, plan, shuffle=False))


def test_plan_for_another_world_size_raises(ranks):
    messages = ranks.run(_error_for, Plan.manual("1,2,3", stage=0))
    for rank, message in enumerate(messages):
        assert f"rank {rank}: the plan is for 3 ranks, but torch.distributed has 4" in message


def _error_for(plan):
    try:
        HeteroBatchSampler(12, plan)
    except ValueError as error:
        return str(error)
    return "no error"


# Streams


def streams(samples, plan, **options):
    return [split_stream(samples, plan, rank=rank, **options) for rank in range(plan.world_size)]


@pytest.mark.parametrize("drop_last", [True, False])
def test_step_of_a_stream_is_the_same_for_every_plan(drop_last):
    whole = [list(range(k, k + 12)) for k in (0, 12, 24)]
    for plan in PLANS:
        drawn = [
            [s for rank, part in enumerate(parts) if plan.samples(rank) for s in part]
            for parts in zip(*streams(range(40), plan, drop_last=drop_last), strict=True)
        ]
        assert drawn == whole + [list(range(36, 40))] * (not drop_last)


def test_rank_without_samples_reads_a_placeholder():
    stream = split_stream(range(24), Plan.manual("0,12", stage=0), rank=0)
    assert list(stream) == [[0], [12]]


def test_too_short_end_of_stream_raises_on_every_rank():
    plan = Plan.manual("2,2,0,2", stage=0)
    for stream in streams(range(8), plan, drop_last=False):
        steps = iter(stream)
        next(steps)
        with pytest.raises(ValueError, match="the stream ended, and its last global batch has 2"):
            next(steps)


def loaded(stream, workers, **options):
    return DataLoader(
        stream, batch_size=None, collate_fn=list, num_workers=workers, prefetch_factor=3, **options
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize(("workers", "persistent"), [(1, False), (3, True)])
def test_workers_keep_the_order_of_a_stream(workers, persistent):
    plan = Plan.manual("1,3", stage=0)
    for length in (0, 8, 43):
        stream = split_stream(range(length), plan, rank=1, drop_last=False)
        loader = loaded(stream, workers, persistent_workers=persistent)
        in_this_process = list(split_stream(range(length), plan, rank=1, drop_last=False))
        assert [list(loader) for _ in range(2)] == [in_this_process] * 2


class OwnShards(IterableDataset):
    """Takes a part in each worker, as torch's documentation shows it."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from range(first, 40, step)


def of_hugging_face():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)


STREAMS = {"plain": lambda: range(40), "own shards": OwnShards, "Hugging Face": of_hugging_face}


@pytest.mark.parametrize("habit", STREAMS)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_is_read_once_whatever_the_stream_does_in_workers(habit, workers):
    plan = Plan.manual("1,3", stage=0)

    def read(stream):
        loader = DataLoader(stream, batch_size=None, collate_fn=list, num_workers=workers)
        return [[s["x"] if habit == "Hugging Face" else s for s in part] for part in loader]

    parts = [read(split_stream(STREAMS[habit](), plan, rank=rank)) for rank in (0, 1)]
    drawn = [[s for part in step for s in part] for step in zip(*parts, strict=True)]
    assert drawn == [list(range(k, k + 4)) for k in range(0, 40, 4)]
    resumed = split_stream(STREAMS[habit](), plan, rank=1)
    resumed.load_state_dict(split_stream(range(40), plan, rank=1).state_dict(steps_done=3))
    assert read(resumed) == parts[1][3:]


@pytest.mark.parametrize("stop", [0, 1, 4, 10])
def test_stream_resumes_and_the_next_iteration_is_complete(stop):
    plan = Plan.manual("1,3", stage=0)
    stream = split_stream(range(40), plan, rank=1)
    whole = list(stream)
    before = list(islice(stream, stop))
    assert before == whole[:stop]
    resumed = split_stream(range(40), Plan.manual("0,1,3", stage=0), rank=2)
    resumed.load_state_dict(through_json(stream.state_dict()))
    assert list(resumed) == whole[stop:]
    assert list(resumed) == whole


@pytest.mark.parametrize("persistent", [True, False])
def test_stream_with_workers_resumes_and_the_next_iteration_is_complete(persistent):
    plan = Plan.manual("1,3", stage=0)
    whole = list(split_stream(range(40), plan, rank=1))
    stream = split_stream(range(40), plan, rank=1)
    loader = loaded(stream, 2, persistent_workers=persistent)
    for done in (5, 2):
        assert list(islice(loader, 2)) == whole[:2]
        stream.load_state_dict(stream.state_dict(steps_done=done))
        assert list(loader) == whole[done:]
        assert list(loader) == whole
    assert list(stream) == whole


def test_stream_with_workers_needs_steps_done():
    stream = split_stream(range(40), Plan.manual("4", stage=0))
    assert stream.state_dict()["step"] == 0
    list(loaded(stream, 1))
    with pytest.raises(RuntimeError, match="pass steps_done="):
        stream.state_dict()
    assert stream.state_dict(steps_done=3)["step"] == 3


def test_resuming_a_too_short_stream_raises():
    plan = Plan.manual("4", stage=0)
    state = split_stream(range(40), plan).state_dict(steps_done=7)
    other = split_stream(range(20), plan)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="skips 28 samples, but the stream ended after 20"):
        list(other)


def test_state_of_another_stream_raises():
    stream = split_stream(range(40), Plan.manual("4", stage=0))
    with pytest.raises(ValueError, match="saved with global_batch=8, but here it is 4"):
        stream.load_state_dict({**stream.state_dict(), "global_batch": 8})
    with pytest.raises(ValueError, match="not a state of split_stream"):
        stream.load_state_dict(HeteroBatchSampler(4, Plan.manual("4", stage=0)).state_dict())
    with pytest.raises(ValueError, match="at least 0, got -1"):
        stream.state_dict(steps_done=-1)

"""`ShardTensor` in `torch.distributed.checkpoint`, without Poplar: any cuts, read by any model."""

from __future__ import annotations

import copy
import io
import math
import multiprocessing
import pickle
import random
import warnings
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as save_file
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.multiprocessing.reductions import reduce_tensor

from poplar.checkpoint.state_dicts.shard_tensor import ParameterShard, ShardTensor
from tests.subset import choose


def cut(values, start, stop):
    return ShardTensor(values.flatten()[start:stop].clone(), values.shape, start)


def random_cuts(generator, numel, ranks):
    inside = sorted(generator.randint(0, numel) for _ in range(ranks - 1))
    return list(zip([0, *inside], [*inside, numel], strict=True))


def save(folder, by_rank):
    """What `torch.distributed.checkpoint.save` does on each rank, in one process."""
    planners = [DefaultSavePlanner() for _ in by_rank]
    for rank, (planner, state) in enumerate(zip(planners, by_rank, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
    plans, metadata = planners[0].create_global_plan([p.create_local_plan() for p in planners])
    writer = FileSystemWriter(folder)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    results = []
    for planner, plan in zip(planners, plans, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, results)


def load(folder, state):
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


@pytest.mark.parametrize("seed", range(choose(quick=6, full=60)))
def test_any_cuts_are_read_by_any_other_cuts_and_by_plain_tensors(tmp_path, seed):
    generator = random.Random(seed)
    shapes = [(), (7,), (0, 3), (5, 4), (2, 3, 5), (2, 1, 3, 4)]
    whole = {f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    ranks = generator.randint(1, 4)
    cuts = {name: random_cuts(generator, v.numel(), ranks) for name, v in whole.items()}
    save(
        tmp_path,
        [{name: cut(v, *cuts[name][rank]) for name, v in whole.items()} for rank in range(ranks)],
    )
    plain = {name: torch.full_like(v, math.nan) for name, v in whole.items()}
    load(tmp_path, plain)
    for name, values in whole.items():
        assert torch.equal(plain[name], values)
        for start, stop in random_cuts(generator, values.numel(), 3):
            part = cut(torch.full_like(values, math.nan), start, stop)
            memory = part.local
            load(tmp_path, {name: part})
            assert torch.equal(memory, values.flatten()[start:stop])  # in place


def test_plain_save_and_load_functions_of_torch(tmp_path):
    values = torch.randn(3, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group
        dcp.save({"w": cut(values, 0, 15)}, checkpoint_id=tmp_path, no_dist=True)
        target = {"w": torch.zeros(3, 5)}
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target["w"], values)


def test_copies_have_their_own_memory_and_the_same_range():
    part = cut(torch.arange(12.0).reshape(3, 4), 5, 9)
    stored = io.BytesIO()
    torch.save(part, stored)
    stored.seek(0)
    copies = [part.clone(), copy.deepcopy(part), torch.load(stored, weights_only=True)]
    part.local.zero_()
    for copied in copies:
        assert (copied.shape, copied.start, copied.stop) == ((3, 4), 5, 9)
        assert copied.local.tolist() == [5.0, 6.0, 7.0, 8.0]
    part.copy_(copies[0])
    assert part.local.tolist() == [5.0, 6.0, 7.0, 8.0]
    assert part.to(torch.float64).local.dtype is torch.float64
    assert part.detach().local.data_ptr() == part.local.data_ptr()


def test_pickle_holds_only_the_local_elements():
    part = ShardTensor(torch.zeros(100_000)[:10], (100, 1000), 50)
    stored = io.BytesIO()
    torch.save(part, stored)
    assert stored.tell() < 10_000


def test_operators_that_need_the_whole_tensor_raise():
    part = cut(torch.zeros(3, 4), 5, 9)
    with pytest.raises(TypeError, match="only a part of its elements"):
        part.sum()
    with pytest.raises(TypeError, match="same range"):
        part.copy_(cut(torch.zeros(3, 4), 4, 8))


def call_every_method(connection):
    """Send which methods gave memory of the whole tensor; the process may end before."""
    warnings.simplefilter("ignore")
    plain = torch.ones(3, 5)
    gave_memory = []
    for name in sorted(dir(torch.Tensor)):
        for arguments in ((), (cut(plain, 3, 7),), (0,), (plain,), (lambda value: value,)):
            part = cut(torch.arange(15.0).view(3, 5), 3, 7)
            try:
                value = getattr(part, name)
                value = value(*arguments) if callable(value) else value
            except Exception:  # an error is right
                continue
            storage = isinstance(value, (torch.UntypedStorage, torch.TypedStorage))
            whole = type(value) is torch.Tensor and value.numel() == 15 and value is not plain
            if storage or whole:
                gave_memory.append(name)
    connection.send(gave_memory)


def test_no_method_reads_memory_that_is_not_its_own():
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=call_every_method, args=(theirs,))
    process.start()
    theirs.close()
    gave_memory = ours.recv() if ours.poll(120) else None
    process.join(10)
    assert process.exitcode == 0
    # With a whole tensor as the argument, it converts that one.
    assert set(gave_memory) <= {"new_tensor", "new"}


@pytest.mark.parametrize(
    "access",
    [
        lambda part: torch.utils.dlpack.to_dlpack(part),
        lambda part: torch.from_dlpack(part),
        lambda part: torch.Tensor.untyped_storage(part),
        lambda part: torch.empty(0).set_(part),
        lambda part: np.asarray(part),
        lambda part: part.apply_(lambda value: value),
        lambda part: part.is_shared(),
        lambda part: part.pin_memory(),
        lambda part: part.share_memory_(),
        lambda part: _create_cpu_state_dict({"part": part}, share_memory=True),
        lambda part: setattr(torch.ones(3, 5), "data", part),
        lambda part: reduce_tensor(part),
        lambda part: save_file({"part": part}),
    ],
)
def test_access_to_the_memory_of_the_whole_raises(access):
    with pytest.raises((TypeError, RuntimeError)):
        access(cut(torch.arange(15.0).view(3, 5), 3, 7))


def test_parameter_shards_are_sent_between_processes_and_not_saved():
    part = ParameterShard(torch.arange(4.0), (3, 5), 3)
    received = pickle.loads(ForkingPickler.dumps(part))
    assert (type(received), received.start) == (ParameterShard, 3)
    assert torch.equal(received.local, part.local)
    with pytest.raises(RuntimeError, match="only this rank's part"):
        torch.save(part, io.BytesIO())


@pytest.mark.parametrize("local", [torch.zeros(2, 2), torch.zeros(8)[::2]])
def test_local_memory_must_be_flat(local):
    with pytest.raises(ValueError, match="1-D contiguous"):
        ShardTensor(local, (2, 2), 0)

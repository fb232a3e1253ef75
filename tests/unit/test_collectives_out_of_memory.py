"""A collective that runs out of memory can be issued again: none of its calls is made twice.

Otherwise this rank would have made one call more than the others, and the ranks' later calls would
not belong together: they hang, or silently get other data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from issued_calls import RecordCalls, fake_group, of_ranks
from test_streams import simulated
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from poplar import ops
from poplar.comm import Bucket, Codec, Communicator, Group, process_group
from poplar.comm.communicator import Splits
from poplar.comm.hierarchy.transport import HierarchicalCommunicator
from poplar.comm.host_topology import Hosts
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.shard_layout import Layout
from poplar.ops import codec, plain
from poplar.zero.stages.sharded_parameters import ShardedParameters

LAYOUT = Layout((0, 192, 640, 640, 1024))
TRANSPORTS = ["process_group", "hierarchical"]


class OutOfMemoryAt(TorchDispatchMode):
    """Lets one allocation fail, by its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left, self.failed = number, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(value) for value in tree_leaves((args, kwargs)) if _is_tensor(value)}
        result = func(*args, **kwargs or {})
        made = [value for value in tree_leaves(result) if _is_tensor(value)]
        if func.namespace != "c10d" and any(_memory(value) not in given for value in made):
            self.left -= 1
            if self.left < 0 and not self.failed:
                self.failed = True
                raise torch.OutOfMemoryError("no memory")
        return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def connect(name: str, group: Group, hosts_of_ranks: str = "abab") -> Communicator:
    if name != "hierarchical":
        return ProcessGroupCommunicator(group)
    hosts = Hosts.of(hosts_of_ranks)
    members = hosts.members[hosts.host_of(group.rank)]
    host_group = replace(of_ranks(members), names=members, failures=group.failures)
    return HierarchicalCommunicator(group, hosts, host_group)


def collectives(comm: Communicator, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    bucket = Bucket(torch.ones(LAYOUT.numel).to(dtype), LAYOUT, Codec(dtype))
    own = LAYOUT.size(comm.group.rank)
    out, squares = torch.zeros(own), torch.zeros(own // 64)
    data = torch.ones(LAYOUT.numel)

    def reduce() -> None:
        comm.reduce_scatter(bucket, out, accumulate=True, what="it", squares=squares).wait()

    return {
        "reduce_scatter": reduce,
        "all_gather": lambda: void(comm.all_gather(data, LAYOUT, what="it").wait()),
        "all_to_all": lambda: void(
            comm.all_to_all(torch.zeros(8), data[:8], Splits([2] * 4, [2] * 4), what="it").wait()
        ),
        "reshard": lambda: void(comm.reshard(out, LAYOUT, Layout.even(1024, 4), what="it")),
    }


def void(_: object) -> None: ...


@contextmanager
def calls() -> Iterator[list[str]]:
    with RecordCalls() as recorded:
        names: list[str] = []
        yield names
    names += [call.name for call in recorded.calls]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_no_call_is_made_twice(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "RECEIVED_BYTES", 1024)  # a reduction is several calls
    failures = 0
    with fake_group(1, 4) as group:
        comm = connect(name, group)
        for operation, issue in collectives(comm, dtype).items():
            with calls() as expected:
                issue()
            for number in range(100):
                with calls() as found:
                    limit = OutOfMemoryAt(number)
                    try:
                        with limit:
                            issue()
                    except torch.OutOfMemoryError:
                        issue()
                assert found == expected, (operation, number)
                failures += limit.failed
                if not limit.failed:
                    break
    assert failures > 3


@pytest.mark.parametrize(
    ("name", "hosts"), [("process_group", ""), ("hierarchical", "abab"), ("hierarchical", "abaa")]
)
def test_a_sum_without_memory_between_two_calls_ends_the_group(
    name: str, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of plain PyTorch allocate, as on cards for which no kernels were built.

    On hosts "abaa" this rank sums without a call: it is alone on its host.
    """
    monkeypatch.setattr(process_group, "RECEIVED_BYTES", 1024)  # a reduction is several calls
    monkeypatch.setattr(ops, "rank_sum_", plain.rank_sum_)
    bucket, ended = Bucket(torch.ones(LAYOUT.numel), LAYOUT, Codec()), 0
    for number in range(100):
        with fake_group(1, 4) as group:
            comm, out = connect(name, group, hosts), torch.zeros(LAYOUT.size(1))
            limit = OutOfMemoryAt(number)
            with calls() as made, suppress(torch.OutOfMemoryError), limit:
                comm.reduce_scatter(bucket, out, accumulate=False, what="it")
            if not limit.failed:
                break
            assert bool(group.failures) == bool(made), number
            ended += bool(made)
    assert ended > 0 or hosts == "abaa"


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", ["rank_sum_", "decode_sum_"])
def test_a_sum_in_plain_pytorch_that_ran_out_of_memory_is_repeated(
    name: str, accumulate: bool
) -> None:
    """Parts are added once, wherever memory runs out."""
    generator = torch.Generator().manual_seed(0)
    received = [torch.randn(128, generator=generator) for _ in range(3)]
    if name == "decode_sum_":
        codes = [torch.empty(codec.encoded_bytes(128, 8), dtype=torch.uint8) for _ in received]
        for code, part in zip(codes, received, strict=True):
            plain.encode_(code, [part], [0], 1.0, 8, 0, 0)
        received = codes
    bits = [8] if name == "decode_sum_" else []

    def add(out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        getattr(plain, name)(out, received, *bits, accumulate, sums)
        return out, sums

    expected, failures = add(torch.ones(128), torch.zeros(2)), 0
    for number in range(100):
        memory = torch.ones(128), torch.zeros(2)
        with suppress(torch.OutOfMemoryError), OutOfMemoryAt(number) as limit:
            add(*memory)
        if not limit.failed:
            break
        failures += 1
        found = add(*memory)
        assert torch.equal(found[0], expected[0]), number
        assert torch.equal(found[1], expected[1]), number
    assert failures > 1


class Reduction:
    """One whose sum fails as often as given."""

    def __init__(self, log: list[str], name: str, failures: int = 0) -> None:
        self.log, self.name, self.failures = log, name, failures

    def issue(self) -> Reduction:
        self.log.append(f"issue {self.name}")
        return self

    def wait(self) -> float:
        if self.failures > 0:
            self.failures -= 1
            raise torch.OutOfMemoryError("no memory for the sum")
        self.log.append(f"sum {self.name}")
        return 0.0


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_reduction_is_issued_once_if_memory_runs_out_in_the_sum_before_it(failures: int) -> None:
    """As the engine does: after an error it starts the same reduction again."""
    strategy, *_ = simulated(ShardedParameters, 1)
    log: list[str] = []
    reductions: Any = strategy.reductions
    works = [Reduction(log, "a", failures), Reduction(log, "b"), Reduction(log, "c")]
    steps: list[Callable[[], None]] = [
        *(lambda work=work: reductions.start(work.issue) for work in works),  # type: ignore[misc]
        reductions.finish,
    ]
    for step in steps:
        for _ in range(5):
            try:
                step()
                break
            except torch.OutOfMemoryError:
                continue
    assert [entry for entry in log if "issue" in entry] == ["issue a", "issue b", "issue c"]
    assert [entry for entry in log if "sum" in entry] == ["sum a", "sum b", "sum c"]
    assert log.index("issue c") > log.index("sum a")  # at most two hold memory


def test_an_unshard_of_two_flat_parameters_goes_on_where_memory_ran_out() -> None:
    strategy, transport, units = simulated(ShardedParameters, 2)
    both = replace(units[0], flats=(units[0].flats[0], units[1].flats[0]))
    gather, sent = transport.all_gather, []

    def gather_with_little_memory(data: Tensor, *arguments: Any, **options: Any) -> Any:
        if len(sent) == 1:
            sent.append(None)
            raise torch.OutOfMemoryError("no memory")
        sent.append(data.data_ptr())
        return gather(data, *arguments, **options)

    transport.all_gather = gather_with_little_memory  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        strategy.unshard(both, in_step=True)
    strategy.unshard(both, in_step=True)
    assert sent == [both.flats[0].values.data_ptr(), None, both.flats[1].values.data_ptr()]
    strategy.wait_for_unshard(both)

"""Rows of factored layers against autograd: what is captured, and the product of what arrives."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from poplar import ops
from poplar.comm.shard_layout import Layout
from poplar.system.trace import Trace
from poplar.zero.factors.capture import FactoredForward
from poplar.zero.factors.reduction import RowReduction, blocks, weigh_rows
from poplar.zero.factors.rows import FactoredRows
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.stages.reduction import Reductions
from poplar.zero.streams import Streams
from poplar.zero.waiting import WaitingTime

CPU = torch.device("cpu")


class CountsOfRanks:
    """A control channel on which all ranks have sent what they are given."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def exchange(self, values: Tensor, *, what: str) -> Callable[[], list[Tensor]]:
        return lambda: [torch.tensor([count]) for count in self.counts]


class RowsOfRanks:
    """A transport that fills in the rows of the other ranks, in the order of the gathers."""

    def __init__(self, rank: int, matrices: list[Tensor]) -> None:
        self.group, self.matrices = SimpleNamespace(rank=rank), matrices

    def gather_columns(self, data: Tensor, rows: Layout, columns: Any, *, what: str) -> Any:
        whole, (first, last) = self.matrices.pop(0), columns[self.group.rank]
        own = slice(*rows.bounds(self.group.rank))
        torch.testing.assert_close(data[own], whole[own])

        def wait() -> float:
            data[:, first:last] = whole[:, first:last]
            return 0.0

        return SimpleNamespace(wait=wait)


def flat_of(layer: nn.Linear, dtype: torch.dtype = torch.float32) -> FlatParameter:
    return FlatParameter("a", [("a.weight", layer.weight)], dtype=dtype, trained=True, groups=[0])


# Capture


def layer_and_rows(bias: bool = True) -> tuple[nn.Linear, FactoredRows]:
    torch.manual_seed(0)
    layer = nn.Linear(7, 5, bias=bias)
    return layer, FactoredRows("a", 5, 7, CPU, CountsOfRanks([0]))


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def twice(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + layer(2 * x)


def changed_in_place(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).relu_()


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(plain, layer, x, use_reentrant=False)


def checkpointed_twice(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(twice, layer, x, use_reentrant=True)


def in_bf16(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


def partly_unused(layer: nn.Module, x: Tensor) -> Tensor:
    layer(x)
    return layer(x)


USES = (plain, twice, changed_in_place, checkpointed, checkpointed_twice, in_bf16, partly_unused)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shape", [(6, 7), (0, 7), (2, 3, 7), (2, 0, 7), (7,)])
@pytest.mark.parametrize("bias", [True, False])
def test_captured_rows_give_the_gradient_of_autograd(use, shape, bias):
    layer, rows = layer_and_rows(bias)
    reference = copy.deepcopy(layer)
    x = torch.randn(shape, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    use(reference, same).square().sum().backward()
    announced: list[int] = []
    rows.token.register_post_accumulate_grad_hook(lambda token: announced.append(1))
    hidden = FactoredForward(layer, rows)
    use(layer, x).square().sum().backward()
    assert announced == [1], "once, when all calls have been captured"
    assert layer.weight.grad is None
    found = sum((dy.float().t() @ x.float() for x, dy in rows._captured), torch.zeros(5, 7))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if use is in_bf16 else {}
    torch.testing.assert_close(found, reference.weight.grad, **tolerance)
    torch.testing.assert_close(x.grad, same.grad)
    if bias:
        torch.testing.assert_close(layer.bias.grad, reference.bias.grad)
    hidden.remove()
    assert "forward" not in vars(layer)


def test_inputs_that_need_no_gradient_are_captured_without_a_bias():
    layer, rows = layer_and_rows(bias=False)
    FactoredForward(layer, rows)
    layer(input=torch.ones(3, 7)).sum().backward()
    assert sum(len(x) for x, _ in rows._captured) == 3


def test_a_forward_without_gradients_captures_nothing():
    layer, rows = layer_and_rows()
    FactoredForward(layer, rows)
    with torch.no_grad():
        assert not layer(torch.ones(3, 7)).requires_grad
    layer.weight.requires_grad_(False)
    layer(torch.ones(3, 7)).sum().backward()
    assert rows._captured == []


def test_inputs_may_change_after_the_backward_but_not_before():
    layer, rows = layer_and_rows()
    FactoredForward(layer, rows)
    x = torch.ones(3, 7)
    loss = layer(x).sum()
    loss.backward()
    x.zero_()
    assert torch.equal(rows._captured[0][0], torch.ones(3, 7))
    loss = layer(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_copy_of_the_layer_is_plain():
    layer, rows = layer_and_rows()
    FactoredForward(layer, rows)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        copied(torch.ones(3, 7)).sum().backward()
        assert copied.weight.grad is not None
    assert rows._captured == []


# Reduction


def test_blocks_cover_a_range_in_at_most_three_parts():
    draw = random.Random(0)
    for _ in range(500):
        height, width = draw.randint(1, 9), draw.randint(1, 70)
        numbers = torch.arange(height * width).view(height, width)
        start, stop = sorted(draw.randint(0, height * width) for _ in range(2))
        found = list(blocks(start, stop, width))
        assert len(found) <= 3
        assert [block.start for block in found] + [stop] == [
            start, *(block.stop for block in found)
        ]  # fmt: skip
        parts = [
            numbers[b.first_row : b.last_row, b.first_column : b.last_column].flatten()
            for b in found
        ]
        assert torch.equal(torch.cat([numbers[:0, 0], *parts]), numbers.flatten()[start:stop])


@pytest.mark.parametrize("dtypes", ["fp32", "bf16 wire", "bf16 layer", "bf16"])
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.every_combination
def test_an_owner_computes_its_part_of_the_gradient(dtypes, accumulated):
    draw = random.Random(1)
    compute = torch.bfloat16 if dtypes in ("bf16 layer", "bf16") else torch.float32
    wire = torch.bfloat16 if dtypes in ("bf16 wire", "bf16") else torch.float32
    for _ in range(60):
        outputs, inputs, ranks = draw.randint(1, 30), draw.randint(1, 30), draw.randint(1, 4)
        counts = [draw.choice((0, 0, 1, 5)) for _ in range(ranks)]
        total, rank, weight = sum(counts), draw.randrange(ranks), draw.random()
        x, dy = torch.randn(total, inputs).to(compute), torch.randn(total, outputs).to(compute)
        sent_x = x.to(torch.bfloat16 if dtypes != "fp32" else torch.float32)
        sent_dy = (dy.float() * weight).to(wire)

        flat = flat_of(nn.Linear(inputs, outputs), compute)
        cuts = sorted(64 * draw.randint(0, flat.numel // 64) for _ in range(ranks - 1))
        flat.layout = Layout((0, *cuts, flat.numel))
        owned = [(0, flat.numel)] * ranks  # as at stage 0
        if draw.random() < 0.7:
            owned = [flat.layout.bounds(other) for other in range(ranks)]
        flat.owned = low, high = owned[rank]
        flat.gradient = torch.full((high - low,), 0.5 if accumulated else torch.nan)
        flat.squares = torch.full((flat.layout.size(rank) // 64,), torch.nan)

        rows = FactoredRows("a", outputs, inputs, CPU, CountsOfRanks(counts))
        begins = (0, *accumulate(counts))
        first, last = list(pairwise(begins))[rank]
        middle = draw.randint(first, last)
        for own in (slice(first, middle), slice(middle, last)):  # two calls of the layer
            rows.capture(x[own], dy[own])
        weigh_rows(flat, rows, weight, wire)
        rows.capture(x[first:last] * torch.nan, dy[first:last])
        weigh_rows(flat, rows, 0.0, wire)  # a pass without weight
        comm = RowsOfRanks(rank, [sent_dy, sent_x])
        RowReduction(flat, rows, owned, comm, wire, accumulate=accumulated).send().wait()

        whole = torch.zeros(flat.numel)
        whole[: outputs * inputs] = (sent_dy.double().t() @ sent_x.double()).float().flatten()
        expected = whole[low:high] + (0.5 if accumulated else 0.0)
        numel = min(high, outputs * inputs) - low  # the padding has no meaning if accumulated
        torch.testing.assert_close(flat.gradient[: max(numel, 0)], expected[: max(numel, 0)])
        if not accumulated:
            assert not flat.gradient[max(numel, 0) :].any()
        own_blocks = flat.gradient[slice(*(b - low for b in flat.layout.bounds(rank)))]
        torch.testing.assert_close(flat.squares, ops.block_sums_of_squares(own_blocks))
        assert rows.tensors() == []


def test_a_reduction_that_runs_out_of_memory_is_sent_again_from_there(monkeypatch):
    layer = nn.Linear(7, 5)
    flat, x, dy = flat_of(layer), torch.randn(2, 7), torch.randn(2, 5)
    flat.layout, flat.owned = Layout((0, flat.numel)), (0, flat.numel)
    flat.gradient, flat.squares = torch.empty(flat.numel), torch.empty(1)
    rows = FactoredRows("a", 5, 7, CPU, CountsOfRanks([2]))
    rows.capture(x, dy)
    weigh_rows(flat, rows, 1.0, torch.float32)
    comm = RowsOfRanks(0, [dy, x])
    reduction = RowReduction(flat, rows, [flat.owned], comm, torch.float32, accumulate=False)
    gather = comm.gather_columns

    def fail_for_x(data: Tensor, *args: Any, **options: Any) -> Any:
        if data.shape[1] == 7:
            raise MemoryError
        return gather(data, *args, **options)

    monkeypatch.setattr(comm, "gather_columns", fail_for_x)
    with pytest.raises(MemoryError):
        reduction.send()
    monkeypatch.setattr(comm, "gather_columns", gather)
    reduction.send().wait()
    assert comm.matrices == []
    torch.testing.assert_close(flat.gradient[:35].view(5, 7), dy.t() @ x)


def test_a_deferred_reduction_is_sent_before_a_later_one_is_waited_for():
    """All ranks must get there for the later one too, so nothing is waited for longer."""
    events: list[str] = []
    reductions = Reductions(WaitingTime(Streams(), Trace()))

    def issue(name: str) -> Any:
        events.append(f"send {name}")
        return SimpleNamespace(wait=lambda: events.append(f"wait for {name}") or 0.0)

    def deferred(name: str) -> Any:
        return SimpleNamespace(send=lambda: issue(name), data=torch.empty(0))

    for name in ("a", "b", "C", "d", "e", "F"):
        if name.isupper():
            reductions.defer(deferred(name))
        else:
            reductions.make_room()
            reductions.start(lambda name=name: issue(name))
    assert events == ["send a", "send b", "wait for a", "send d", "wait for b", "send e"]
    reductions.make_room()
    assert events[6:] == ["send C", "wait for d", "wait for e"]
    assert len(reductions.buckets()) == 2
    reductions.finish()
    assert events[9:] == ["send F", "wait for C", "wait for F"]
    assert reductions.buckets() == []

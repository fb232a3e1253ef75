"""Rows of factored layers against autograd: what is captured, and the product of what arrives."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from poplar import ops
from poplar.comm.communicator import Splits
from poplar.comm.shard_layout import Layout
from poplar.system.trace import Trace
from poplar.zero.factors.capture import CapturingForward
from poplar.zero.factors.parameter import FactoredParameter, RowReduction
from poplar.zero.stages.reduction import Reductions
from poplar.zero.streams import Streams, Timing

CPU = torch.device("cpu")


class CountsOfRanks:
    """A control channel on which all ranks have sent what they are given."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def exchange(self, values: Tensor, *, what: str) -> Callable[[], list[Tensor]]:
        return lambda: [torch.tensor([count]) for count in self.counts]


class Transport:
    """All-to-alls of ranks in one process, which call it one after the other and then wait."""

    def __init__(self, rank: int, sent: dict[int, tuple[Tensor, ...]], ranks: int) -> None:
        self.group, self.sent = SimpleNamespace(rank=rank, size=ranks), sent

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Splits, *, what: str) -> Any:
        rank = self.group.rank
        self.sent[rank] = sent.split(sizes.sent)

        def wait() -> float:
            parts = [self.sent[peer][rank] for peer in range(self.group.size)]
            assert [part.numel() for part in parts] == sizes.received
            received.copy_(torch.cat(parts))
            return 0.0

        return SimpleNamespace(wait=wait)


class Strategy:
    """What a factored parameter uses of a ZeRO stage, on one rank."""

    def __init__(
        self,
        comm: Any,
        wire_dtype: torch.dtype = torch.float32,
        owned: list[tuple[int, int]] | None = None,
    ) -> None:
        self.comm, self.owned = comm, owned
        self.codec = SimpleNamespace(wire_dtype=wire_dtype)
        self.reductions, self.deferred = SimpleNamespace(defer=self.defer), []

    def defer(self, reduction: RowReduction) -> None:
        self.deferred.append(reduction)

    def owned_part(self, layout: Layout, rank: int) -> tuple[int, int]:
        return layout.bounds(rank) if self.owned is None else self.owned[rank]

    def ensure_gradient(self, flat: FactoredParameter, allocate: Callable[[], Tensor]) -> None:
        if not flat.gradient.numel():
            blocks = flat.layout.size(self.comm.group.rank) // 64
            flat.hold_gradient(allocate(), torch.full((blocks,), torch.nan))


def flat_of(
    layer: nn.Linear, dtype: torch.dtype = torch.float32, counts: list[int] | None = None
) -> FactoredParameter:
    return FactoredParameter(
        "a",
        [("a.weight", layer.weight)],
        dtype=dtype,
        trained=True,
        groups=[0],
        layer=layer,
        control=CountsOfRanks(counts or [0]),
    )


# Capture


def layer_and_forward(bias: bool = True) -> tuple[nn.Linear, CapturingForward]:
    torch.manual_seed(0)
    layer = nn.Linear(7, 5, bias=bias)
    forward = CapturingForward(layer, "a.weight")
    forward.install()
    return layer, forward


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


def at_another_input(layer: nn.Module, x: Tensor) -> Tensor:
    first = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(first).square().sum(), first)
    return layer(x + gradient.sign())


def at_another_checkpointed_input(layer: nn.Module, x: Tensor) -> Tensor:
    first = x.detach().requires_grad_()
    checkpointed(layer, first).square().sum().backward(inputs=[first])
    return checkpointed(layer, x + first.grad.sign())


def in_the_same_graph(layer: nn.Module, x: Tensor) -> Tensor:
    y = twice(layer, x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    return y * (1 + gradient.square().sum())


USES = (
    *(plain, twice, changed_in_place, checkpointed, checkpointed_twice, in_bf16, partly_unused),
    *(at_another_input, at_another_checkpointed_input, in_the_same_graph),
)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shape", [(6, 7), (2, 0, 7), (7,)])
@pytest.mark.parametrize("bias", [True, False])
def test_captured_rows_give_the_gradient_of_autograd(use, shape, bias):
    layer, forward = layer_and_forward(bias)
    forward.remove()
    reference = copy.deepcopy(layer)
    forward.install()
    x = torch.randn(shape, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    use(reference, same).square().sum().backward()
    announced: list[int] = []
    forward.token.register_post_accumulate_grad_hook(lambda token: announced.append(1))
    use(layer, x).square().sum().backward()
    assert announced == [1], "once, when all calls have been captured"
    assert layer.weight.grad is None
    found = sum((dy.float().t() @ x.float() for x, dy in forward.captured), torch.zeros(5, 7))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if use is in_bf16 else {}
    torch.testing.assert_close(found, reference.weight.grad, **tolerance)
    torch.testing.assert_close(x.grad, same.grad)
    if bias:
        torch.testing.assert_close(layer.bias.grad, reference.bias.grad)
    forward.remove()
    assert "forward" not in vars(layer)


def test_inputs_that_need_no_gradient_are_captured_without_a_bias():
    layer, forward = layer_and_forward(bias=False)
    layer(input=torch.ones(3, 7)).sum().backward()
    assert sum(len(x) for x, _ in forward.captured) == 3


def test_a_forward_without_gradients_captures_nothing():
    layer, forward = layer_and_forward()
    with torch.no_grad():
        assert not layer(torch.ones(3, 7)).requires_grad
    layer.weight.requires_grad_(False)
    layer(torch.ones(3, 7)).sum().backward()
    assert forward.captured == []


@pytest.mark.parametrize("is_among", [False, True])
def test_a_backward_to_some_tensors_captures_rows_if_the_weight_is_among_them(is_among):
    layer, forward = layer_and_forward()
    x = torch.ones(3, 7, requires_grad=True)
    wanted = [x, layer.weight] if is_among else [x, layer.bias]
    layer(x).sum().backward(inputs=wanted)
    assert sum(len(x) for x, _ in forward.captured) == (3 if is_among else 0)


def test_the_gradient_of_the_weight_alone_cannot_be_computed():
    layer, forward = layer_and_forward()
    loss = layer(torch.ones(3, 7)).sum()
    with pytest.raises(RuntimeError, match=r"autograd\.grad with respect to 'a\.weight'"):
        torch.autograd.grad(loss, layer.weight, allow_unused=True)
    assert forward.captured == []


def masked(layer: nn.Linear, x: Tensor) -> Tensor:
    mask = torch.arange(35.0).view(5, 7)
    return functional_call(layer, {"weight": layer.weight * mask}, (x,))


def mapped(layer: nn.Linear, x: Tensor) -> Tensor:
    return vmap(layer)(x)


def hooked(layer: nn.Linear, x: Tensor) -> Tensor:
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    return layer(x)


@pytest.mark.parametrize("use", [masked, mapped, hooked])
def test_a_gradient_that_is_not_the_product_of_rows_is_that_of_autograd(use):
    layer, forward = layer_and_forward()
    forward.remove()
    reference = copy.deepcopy(layer)
    forward.install()
    x = torch.randn(3, 7)
    for each in (layer, reference):
        use(each, x).square().sum().backward()
    assert forward.captured == []
    torch.testing.assert_close(layer.weight.grad, reference.weight.grad)


def test_a_hook_that_is_registered_before_the_backward_raises():
    layer, _ = layer_and_forward()
    loss = layer(torch.ones(3, 7)).sum()
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(RuntimeError, match=r"a hook was registered on 'a\.weight'"):
        loss.backward()


def test_inputs_may_change_after_the_backward_but_not_before():
    layer, forward = layer_and_forward()
    x = torch.ones(3, 7)
    loss = layer(x).sum()
    loss.backward()
    x.zero_()
    assert torch.equal(forward.captured[0][0], torch.ones(3, 7))
    loss = layer(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_copy_of_the_layer_is_plain():
    layer, forward = layer_and_forward()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        copied(torch.ones(3, 7)).sum().backward()
        assert copied.weight.grad is not None
    assert forward.captured == []


# Reduction


def test_owners_have_whole_rows_and_nearly_their_shares():
    draw = random.Random(0)
    for _ in range(200):
        outputs, inputs, ranks = draw.randint(1, 90), draw.randint(1, 90), draw.randint(1, 5)
        flat = flat_of(nn.Linear(inputs, outputs))
        shares = [draw.choice((0, 1, 1, 2, 5)) + 1e-9 for _ in range(ranks)]
        shares = [share / sum(shares) for share in shares]
        layout = flat.layout_under(shares)
        owned = [flat.outputs_in(*layout.bounds(rank)) for rank in range(ranks)]
        assert [first for first, _ in owned[1:]] == [last for _, last in owned[:-1]]
        assert (owned[0][0], owned[-1][1]) == (0, outputs)
        unit = math.lcm(64, inputs)
        for (first, last), size, share in zip(owned, layout.sizes, shares, strict=True):
            assert size == 0 or size >= (last - first) * inputs
            assert abs(size - share * flat.numel) <= 2 * unit


@pytest.mark.parametrize("dtypes", ["fp32", "bf16 wire", "bf16 layer", "bf16"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.every_combination
def test_an_owner_computes_its_part_of_the_gradient(dtypes, passes):
    draw = random.Random(1)
    compute = torch.bfloat16 if dtypes in ("bf16 layer", "bf16") else torch.float32
    wire = torch.bfloat16 if dtypes in ("bf16 wire", "bf16") else torch.float32
    for _ in range(30):
        outputs, inputs, ranks = draw.randint(1, 30), draw.randint(1, 30), draw.randint(1, 4)
        layer = nn.Linear(inputs, outputs)
        flats = [flat_of(layer, compute) for _ in range(ranks)]
        shares = [draw.random() for _ in range(ranks)]
        layout = flats[0].layout_under([share / sum(shares) for share in shares])
        owned = [layout.bounds(rank) for rank in range(ranks)]
        if draw.random() < 0.3:  # as at stage 0
            layout = Layout.even(layout.numel, ranks)
            owned = [(0, layout.numel)] * ranks
        sent: dict[int, tuple[Tensor, ...]] = {}
        strategies = [Strategy(Transport(rank, sent, ranks), wire, owned) for rank in range(ranks)]
        whole = torch.zeros(layout.numel)
        for _ in range(passes):
            counts = [draw.choice((0, 0, 1, 5)) for _ in range(ranks)]
            for rank, (flat, strategy) in enumerate(zip(flats, strategies, strict=True)):
                flat.layout, flat.owned = layout, owned[rank]
                flat._control.counts, weight = counts, draw.random()
                x = torch.randn(counts[rank], inputs).to(compute)
                dy = torch.randn(counts[rank], outputs).to(compute)
                cut = draw.randint(0, counts[rank])
                for own in (slice(0, cut), slice(cut, None)):  # two calls of the layer
                    flat.forward.capture(x[own], dy[own])
                flat.accumulate(strategy, weight)
                flat.forward.capture(x * torch.nan, dy)
                flat.reduce(strategy, 0.0)  # a pass without weight
                sent_x = x.to(torch.bfloat16 if dtypes != "fp32" else torch.float32)
                sent_dy = (dy.float() * weight).to(wire)
                product = (sent_dy.double().t() @ sent_x.double()).float().flatten()
                whole[: outputs * inputs] += product
            works = [strategy.deferred.pop().send() for strategy in strategies]
            for work in works:
                work.wait()
        for rank, flat in enumerate(flats):
            low, high = owned[rank]
            numel = max(min(high, outputs * inputs) - low, 0)
            torch.testing.assert_close(flat.gradient[:numel], whole[low:high][:numel])
            assert not flat.gradient[numel:].any()
            own_blocks = flat.gradient[slice(*(b - low for b in layout.bounds(rank)))]
            torch.testing.assert_close(flat.squares, ops.block_sums_of_squares(own_blocks))
            assert flat.held_gradients() == []


def test_a_reduction_that_runs_out_of_memory_is_repeated_from_there(monkeypatch):
    """Also if the gradient has been added, but not its sums of squares: it is not added twice."""
    flat, strategy = flat_of(nn.Linear(7, 5), counts=[2]), Strategy(Transport(0, {}, 1))
    flat.layout, flat.owned = Layout((0, flat.numel)), (0, flat.numel)
    x, dy = torch.randn(2, 7), torch.randn(2, 5)
    for _ in range(2):
        flat.forward.capture(x, dy)
        flat.reduce(strategy, 1.0)
        reduction = strategy.deferred.pop()
        with monkeypatch.context() as patches:
            patches.setattr(strategy.comm, "all_to_all", lambda *_, **__: fail())
            with pytest.raises(MemoryError):
                reduction.send()
        work = reduction.send()
        for owner, name in ((Tensor, "addmm_"), (ops, "block_sums_of_squares")):
            with monkeypatch.context() as patches:
                patches.setattr(owner, name, lambda *_, **__: fail())
                with pytest.raises(MemoryError):
                    work.wait()
        work.wait()
    torch.testing.assert_close(flat.gradient[:35].view(5, 7), 2 * (dy.t() @ x))
    torch.testing.assert_close(flat.squares, ops.block_sums_of_squares(flat.gradient))


def fail() -> Any:
    raise MemoryError


def test_a_deferred_reduction_is_sent_before_a_later_one_is_waited_for():
    """All ranks must get there for the later one too, so nothing is waited for longer."""
    events: list[str] = []
    reductions = Reductions(Timing(Streams(), Trace()))

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

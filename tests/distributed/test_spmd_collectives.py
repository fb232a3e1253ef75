"""Differentiable collectives over random cuts: values, adjoints, gradients, errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import ranks as harness
import torch
from communicators import on_host
from native_calls import native_calls
from ranks import Pool
from subset import choose
from torch import Tensor

from poplar.comm import Communicator, Group, connect
from poplar.programmes.run import collectives

WORLD = 4
TIMES = choose(quick=25, full=100)
TRANSPORTS = (
    "shared_memory",
    "process_group",
    "native calls",
    "staged",
    "hierarchical",
    "hierarchical:process_group",
)
HOSTS = "abba"
"""By rank, the host that the hierarchical transports see."""
EPSILON = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.int64: 0.0}


@dataclass(frozen=True)
class Case:
    """A random tensor of all ranks, cut along two of its dimensions."""

    number: int
    shape: tuple[int, ...]
    dims: tuple[int, int]
    bounds: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def draw(
        cls, number: int, generator: random.Random, sizes: Sequence[int] = (0, 1, 1, 2, 5, 9)
    ) -> Case:
        shape = tuple(generator.choice(sizes) for _ in range(generator.randint(2, 4)))
        first, second = generator.sample(range(len(shape)), 2)
        bounds = tuple(random_bounds(shape[dim], generator) for dim in (first, second))
        return cls(number, shape, (first, second), (bounds[0], bounds[1]))

    def values(self, rank: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
        """A tensor of the whole shape."""
        generator = torch.Generator().manual_seed(1000 * self.number + 10 * rank + salt)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return values.to(dtype) if dtype.is_floating_point else (4 * values).to(dtype)

    def part(self, whole: Tensor, rank: int, which: int) -> Tensor:
        """A rank's part of the first or the second of the dimensions."""
        start, stop = self.bounds[which][rank : rank + 2]
        return whole.narrow(self.dims[which], start, stop - start)


def random_bounds(size: int, generator: random.Random) -> tuple[int, ...]:
    """Parts may be empty; often one rank has everything."""
    cuts = sorted(generator.choice((0, size, generator.randint(0, size))) for _ in range(WORLD - 1))
    return (0, *cuts, size)


def connected(transport: str) -> Communicator:
    group = Group.of(harness.group(), None)
    if not transport.startswith("hierarchical"):
        return connect(group, "process_group" if transport == "native calls" else transport)
    with on_host(HOSTS[harness.rank()]):
        return connect(group, transport)


def calls_of(transport: str) -> Any:
    return native_calls() if transport == "native calls" else nullcontext()


def apply(name: str, comm: Communicator, x: Tensor, case: Case) -> Tensor:
    """The collective on this rank, which has `x`."""
    call = getattr(collectives, name)
    if name == "all_reduce":
        return call(comm, x, what=name)
    if name == "all_to_all":
        return call(comm, x, *case.dims, *case.bounds, what=name)
    return call(comm, x, case.dims[0], case.bounds[0], what=name)


# By collective: what a rank has, from the whole values of all ranks, and what it gets.
Places = Callable[[Case, list[Tensor], int], Tensor]
SHARDED: Places = lambda case, values, rank: case.part(values[0], rank, 0)  # noqa: E731
RESHARDED: Places = lambda case, values, rank: case.part(values[0], rank, 1)  # noqa: E731
REPLICATED: Places = lambda case, values, rank: values[0]  # noqa: E731
PARTIAL: Places = lambda case, values, rank: values[rank]  # noqa: E731
SUM: Places = lambda case, values, rank: total(values)  # noqa: E731
PART_OF_SUM: Places = lambda case, values, rank: case.part(total(values), rank, 0)  # noqa: E731
OPERATIONS: dict[str, tuple[Places, Places]] = {
    "all_gather": (SHARDED, REPLICATED),
    "reduce_scatter": (PARTIAL, PART_OF_SUM),
    "all_reduce": (PARTIAL, SUM),
    "all_to_all": (SHARDED, RESHARDED),
}
SUMS = ("reduce_scatter", "all_reduce")


def total(values: list[Tensor]) -> Tensor:
    return torch.stack(values).double().sum(0)


def compare_many(transport: str, times: int, dtype: torch.dtype) -> list[str]:
    """Every collective on random cases; returns the wrong results of this rank."""
    comm, draw, wrong = connected(transport), random.Random(3), []
    rank = comm.group.rank
    for number in range(times):
        case = Case.draw(number, draw)
        values = [case.values(peer, dtype) for peer in range(WORLD)]
        for name, (given, expected) in OPERATIONS.items():
            if name in SUMS and dtype is torch.bool:
                continue
            with calls_of(transport):
                got = apply(name, comm, given(case, values, rank), case)
            right = expected(case, values, rank)
            bound = WORLD * EPSILON[dtype] * 16 if name in SUMS else 0.0  # of values below 16
            if got.dtype is not dtype or got.shape != right.shape:
                wrong.append(f"rank {rank}: {name} of {case}: {got.dtype} {tuple(got.shape)}")
            elif (got.double() - right.double()).abs().gt(bound).any():
                wrong.append(f"rank {rank}: {name} of {case}: {got} instead of {right}")
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [*EPSILON, torch.bool])
def test_values_equal_what_one_process_computes(
    ranks: Pool, transport: str, dtype: torch.dtype
) -> None:
    for wrong in ranks.run(compare_many, transport, TIMES, dtype):
        assert wrong == []


def products_of_many(transport: str, times: int) -> list[tuple[str, float, float]]:
    """This rank's summands of `<A x, y>` and of `<x, A^T y>`, for random x and y."""
    comm, draw, products = connected(transport), random.Random(4), []
    rank = comm.group.rank
    for number in range(times):
        case = Case.draw(number, draw)
        for name, (given, _) in OPERATIONS.items():
            values = [case.values(peer, torch.float64) for peer in range(WORLD)]
            x = given(case, values, rank).clone().requires_grad_()
            with calls_of(transport):
                result = apply(name, comm, x, case)
                seed = torch.randn(result.shape, dtype=torch.float64)
                y = seed * (rank + 1)  # different on every rank
                result.backward(y)
            assert x.grad is not None
            left, right = (result.detach() * y).sum(), (x.detach() * x.grad).sum()
            products.append((f"{name} of {case}", left.item(), right.item()))
    return products


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_backward_is_the_adjoint_over_all_ranks(ranks: Pool, transport: str) -> None:
    by_rank = ranks.run(products_of_many, transport, TIMES)
    for of_ranks in zip(*by_rank, strict=True):
        name = of_ranks[0][0]
        left, right = (sum(products[i] for products in of_ranks) for i in (1, 2))
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12), name


class SumOfGradients(torch.autograd.Function):
    """A value that all ranks have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(ctx.comm, gradient, what="gradients"), None


class SumOfLosses(torch.autograd.Function):
    """The sum of the ranks' contributions; the gradient of each is 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        return collectives.all_reduce(comm, x, what="losses")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def chain(comm: Communicator, x: Tensor, case: Case) -> Tensor:
    """All collectives with something that is not linear between them; a contribution to a loss."""
    (first, second), bounds = case.dims, case.bounds
    own = case.part(x, comm.group.rank, 0)
    moved = collectives.all_to_all(comm, own.sin(), first, second, *bounds, what="moved")
    whole = collectives.all_gather(comm, moved * moved, second, bounds[1], what="whole")
    partial = whole * (comm.group.rank + 1) / 10 + x
    added = collectives.all_reduce(comm, partial, what="added").tanh()
    part = collectives.reduce_scatter(comm, added + x, second, bounds[1], what="part")
    return (part * moved).sum()


def check_gradients(transport: str, times: int) -> bool:
    """`gradcheck` on all ranks at once: all of them change the same element of the same values."""
    comm, draw = connected(transport), random.Random(6)
    right = []
    for number in range(times):
        case = Case.draw(number, draw, sizes=(1, 2))
        x = case.values(0, torch.float64).requires_grad_()

        def loss(x: Tensor, case: Case = case) -> Tensor:
            return SumOfLosses.apply(chain(comm, SumOfGradients.apply(x, comm), case), comm)

        with calls_of(transport):
            right.append(torch.autograd.gradcheck(loss, (x,)))
    return all(right)


@pytest.mark.parametrize("transport", TRANSPORTS[:3])
def test_gradients_of_a_chain_pass_gradcheck(ranks: Pool, transport: str) -> None:
    assert all(ranks.run(check_gradients, transport, choose(quick=3, full=20)))


def order_of_calls() -> tuple[list[str], list[str]]:
    """The collectives of a forward and of its backward, on a graph with two branches."""
    comm = connected("process_group")
    issued: list[str] = []
    for name in ("all_gather", "reduce_scatter"):
        method = getattr(comm, name)

        def recorded(*args: Any, method: Any = method, what: str, **options: Any) -> Any:
            issued.append(what)
            return method(*args, what=what, **options)

        setattr(comm, name, recorded)
    bounds, rank = (0, 3, 3, 4, 6), comm.group.rank
    x = torch.ones(bounds[rank + 1] - bounds[rank], 2, requires_grad=True)
    branches = [x * 2, x * 3]
    # Ranks may run different operators between collectives, as kernels do for empty tensors.
    branches[rank % 2] = branches[rank % 2] + 1
    names = ("left", "right", "again")
    left, right, again = (
        collectives.all_gather(comm, x, 0, bounds, what=name)
        for x, name in zip((*branches, branches[0]), names, strict=True)
    )
    forward = list(issued)
    (left.sum() * right.sum() + again.sum()).backward()
    return forward, issued[len(forward) :]


def test_backward_issues_the_adjoints_in_the_opposite_order(ranks: Pool) -> None:
    for forward, backward in ranks.run(order_of_calls):
        assert forward == ["left", "right", "again"]
        assert backward == [f"the gradient of {name}" for name in reversed(forward)]

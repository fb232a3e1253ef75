"""The tasks: pack, reduce, the update, and the chain from backward to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from operators.lists import TensorList
from operators.optimizers import RULE, Flat, Listed
from operators.peers import Peer
from operators.task import Task, Way
from poplar import ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPERATIONS = ("pack", "reduce", "update", "chain")
OURS = "poplar"
WEIGHT, LOSS_SCALE, MAX_NORM = 0.125, 1024.0, 1.0
RANKS = 4
"""Ranks whose slices `reduce` adds."""
FP32 = 4
FUSED = partial(torch.optim.AdamW, fused=True, **RULE)
FOREACH = partial(torch.optim.AdamW, foreach=True, **RULE)


def tasks_of(
    operations: Sequence[str],
    tensors: TensorList,
    dtype: str,
    device: str = "cpu",
    peers: Sequence[Peer] = (),
) -> Iterator[Callable[[], Task]]:
    """Functions that each create a task, so that one at a time is in memory."""
    makers = {
        "pack": pack,
        "reduce": reduce,
        "update": partial(update, peers=peers),
        "chain": chain,
    }
    for operation in operations:
        yield partial(makers[operation], tensors, DTYPES[dtype], device)


def pack(tensors: TensorList, dtype: torch.dtype, device: str) -> Task:
    """Many gradients into one fp32 bucket, times a weight."""
    grads, offsets, numel = _gradients(tensors, dtype, device)
    bucket, other = (torch.empty(numel, device=device) for _ in range(2))
    places = [other[o : o + g.numel()].view_as(g) for g, o in zip(grads, offsets, strict=True)]
    joined: list[Tensor] = []

    def join() -> None:
        joined.clear()  # a large model does not fit twice
        joined[:] = [torch.cat([g.reshape(-1) for g in grads]).float().mul_(WEIGHT)]

    def copy_and_weigh() -> None:
        torch._foreach_copy_(places, grads)
        other.mul_(WEIGHT)

    return Task(
        name="pack",
        numel=numel,
        least_bytes=numel * (dtype.itemsize + FP32),
        ways={
            OURS: Way(lambda: ops.pack_(bucket, grads, offsets, WEIGHT), lambda: bucket),
            "torch.cat, mul_": Way(join, lambda: joined[0]),
            "_foreach_copy_, mul_": Way(copy_and_weigh, lambda: other),
        },
        usual="torch.cat, mul_",
        device=device,
    )


def reduce(tensors: TensorList, dtype: torch.dtype, device: str) -> Task:
    """Slices of four ranks, added in rank order, with the block sums for the norm."""
    numel = tensors.numel // RANKS
    received = torch.randn(RANKS, numel, generator=_seed(device), device=device).to(dtype)
    parts = list(received.unbind())
    out, other = (torch.empty(numel, device=device) for _ in range(2))
    sums = torch.empty(-(-numel // ops.ALIGNMENT), device=device)

    def one_after_the_other() -> None:
        other.copy_(parts[0])
        for part in parts[1:]:
            other.add_(part)
        torch.linalg.vector_norm(other)

    def at_once() -> None:
        torch.sum(received, 0, dtype=torch.float32, out=other)
        torch.linalg.vector_norm(other)

    return Task(
        name="reduce",
        numel=numel,
        least_bytes=numel * (RANKS * dtype.itemsize + FP32),
        ways={
            OURS: Way(lambda: ops.rank_sum_(out, parts, False, sums), lambda: out),
            "add_, norm": Way(one_after_the_other, lambda: other),
            "sum, norm": Way(at_once, lambda: other),
        },
        usual="add_, norm",
        device=device,
    )


def update(
    tensors: TensorList, dtype: torch.dtype, device: str, peers: Sequence[Peer] = ()
) -> Task:
    """AdamW with clipping, on fp32 gradients; the same step repeatedly.

    16-bit parameters are written from their masters: by Poplar in the same kernel, by others in a
    separate one.
    """
    grads, _, numel = _gradients(tensors, dtype, device)
    joined = torch.cat([g.reshape(-1) for g in grads])
    ours, fused, each = Flat(joined.float(), dtype), Listed(grads, FUSED), Listed(grads, FOREACH)
    half, double, none_found = (torch.tensor(x, device=device) for x in (0.5, 2.0, 0.0))

    def multiply_and_step(listed: Listed, multiply: Callable[[list[Tensor], float], object]) -> Way:
        def run() -> None:
            multiply(listed.grads, 0.5)
            listed.step()

        return Way(run, listed.mean, listed.reset)

    return Task(
        name="update",
        numel=numel,
        least_bytes=(28 + _rounded_bytes(dtype)) * numel,
        ways={
            OURS: Way(lambda: ours.step(half), lambda: ours.mean, ours.reset),
            "mul_, AdamW(fused)": multiply_and_step(fused, torch._foreach_mul_),
            "AdamW(fused), grad_scale": Way(
                lambda: fused.step_with_grad_scaler(double, none_found), fused.mean, fused.reset
            ),
            "mul_, AdamW(foreach)": multiply_and_step(each, torch._foreach_mul_),
            **{
                peer.name: multiply_and_step(
                    Listed([joined] if peer.flat else grads, peer.optimizer), peer.multiply
                )
                for peer in peers
            },
        },
        usual="mul_, AdamW(fused)",
        device=device,
    )


def chain(tensors: TensorList, dtype: torch.dtype, device: str) -> Task:
    """Weight, unscale, check for infinities, norm, clip and update.

    16-bit gradients are widened first and 16-bit parameters written last; see `targets.py` for the
    bytes that each implementation moves.
    """
    grads, offsets, numel = _gradients(tensors, dtype, device)
    bucket = torch.empty(numel, device=device)
    ours, listed = Flat(bucket, dtype), Listed(grads, FUSED)
    weight, inverse = WEIGHT / LOSS_SCALE, torch.tensor(1.0 / LOSS_SCALE, device=device)

    def by_poplar() -> None:
        ops.pack_(bucket, grads, offsets, weight)
        total = torch.zeros(1, ops.EXACT_WORDS, dtype=torch.int64, device=device)
        ops.exact_sum_(total[0], [ops.block_sums_of_squares(bucket)])
        norm = ops.exact_norm(total)
        ours.step(ops.clip_coefficient(norm, MAX_NORM).float(), (~norm.isfinite()).float())

    def usual() -> None:
        """As `GradScaler.unscale_`, `clip_grad_norm_` and `GradScaler.step` do it."""
        listed.receive()
        torch._foreach_mul_(listed.grads, WEIGHT)
        found = torch.full((), 0.0, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(listed.grads, found, inverse)
        torch.nn.utils.clip_grad_norm_(listed.parameters, MAX_NORM, foreach=True)
        listed.step_with_grad_scaler(None, found)

    def best() -> None:
        """One norm; the fused optimizer does the rest."""
        listed.receive()
        norm = torch.nn.utils.get_total_norm(listed.grads, foreach=True) * weight
        divisor = ((norm + 1e-6) / MAX_NORM).clamp(min=1.0) / weight
        listed.step_with_grad_scaler(divisor, (~norm.isfinite()).float())

    return Task(
        name="chain",
        numel=numel,
        least_bytes=(dtype.itemsize + 2 * FP32 + 28 + _rounded_bytes(dtype)) * numel,
        ways={
            OURS: Way(by_poplar, lambda: ours.mean, ours.reset),
            "usual torch": Way(usual, listed.mean, listed.reset),
            "best torch": Way(best, listed.mean, listed.reset),
        },
        usual="usual torch",
        # torch's fp32 norm of these tensors has an error of 8e-4 (compared with float64; ours
        # 5e-13).
        tolerance=2e-3,
        device=device,
    )


def _rounded_bytes(dtype: torch.dtype) -> int:
    """Bytes written besides each fp32 master."""
    return 0 if dtype == torch.float32 else dtype.itemsize


def _gradients(
    tensors: TensorList, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], list[int], int]:
    """Gradients, their offsets in a flat buffer without gaps, and its size."""
    generator = _seed(device)
    grads = [
        torch.randn(shape, generator=generator, device=device).to(dtype) for shape in tensors.shapes
    ]
    ends = list(accumulate(g.numel() for g in grads))
    return grads, [0, *ends[:-1]], ends[-1]


def _seed(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)

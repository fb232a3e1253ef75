"""Cases in which every implementation of the operators gives the bits of plain PyTorch.

The C++ operators (`test_ops.py`, `test_codec.py`), Triton's kernels (`test_triton_kernels.py`) and
the CUDA kernels on the host (`test_cuda_on_host.py`) run all `CASES`: values of every magnitude,
odd sizes, addresses that are not aligned, one tile and many.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poplar import ops
from poplar.ops import codec, plain

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SPECIAL = [float("inf"), -float("inf"), float("nan"), -0.0, 0.0, 1e-45, -3e-39, 6e-8, 65520.0, 3e38]
NORMS = [0.0, 1e-300, 0.05, 0.1 - 1e-6, 0.1, 1 / 3, 1e30, float("inf"), float("nan")]
BF16_ULP = 2**-7
ABSENT = torch.empty(0)
"""Stands for a shard without low-precision values."""


def bits(tensor: Tensor) -> Tensor:
    """The bits, with one value for all NaNs: PyTorch's own NaN payloads depend on the CPU."""
    one_nan = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return one_nan.view(INTEGERS[tensor.dtype])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    differ = bits(actual) != bits(expected)
    assert not differ.any(), (
        f"{int(differ.sum())} of {differ.numel()} elements differ, the first at "
        f"{int(differ.flatten().nonzero()[0])}: {actual[differ][0]}, not {expected[differ][0]}"
    )


def assert_same_value(actual: Tensor, expected: Tensor) -> None:
    """Equal to the last bit; all NaNs are equal."""
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0, equal_nan=True)


class Draw:
    """Tensors drawn from one seed: every magnitude, special values, odd shapes and strides."""

    def __init__(self, seed: int, device: str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def values(self, numel: int, dtype: torch.dtype) -> Tensor:
        scale = torch.exp2(torch.randint(-30, 16, (numel,), generator=self.generator).float())
        values = torch.randn(numel, generator=self.generator) * scale
        for _ in range(min(numel, self.random.randrange(4))):
            values[self.random.randrange(numel)] = self.random.choice(SPECIAL)
        return values.to(dtype).to(self.device)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        shape = self.random.choice(
            [(), (0,), (1,), (7,), (64,), (65,), (3, 5), (2, 3, 4), (31, 33)]
        )
        values = self.values(int(np.prod(shape)), dtype).reshape(shape)
        strided = [values.transpose(0, -1), values.repeat(2, 1)[::2]] if len(shape) == 2 else []
        return self.random.choice([values, *strided])

    def tensors(self, count: int) -> tuple[list[Tensor], list[int], int]:
        """Tensors of any dtype, their offsets in a buffer with gaps, and its size."""
        tensors = [self.tensor(self.random.choice(DTYPES)) for _ in range(count)]
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end + self.random.choice([0, 0, 1, 70]))
            end = offsets[-1] + tensor.numel()
        return tensors, offsets, end + self.random.choice([0, 3])


def moved(tensor: Tensor) -> Tensor:
    """A copy at the same distance from the beginning of its memory."""
    start = tensor.storage_offset()
    memory = torch.empty(start + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return memory[start:].copy_(tensor)


def shifted(values: Tensor, by: int) -> Tensor:
    """The same values, `by` elements after an aligned address."""
    memory = torch.empty(values.numel() + by, dtype=values.dtype, device=values.device)
    return memory[by:].copy_(values)


def new_sums(numel: int, device: str = "cpu") -> Tensor:
    return torch.full((-(-numel // ops.ALIGNMENT),), -1.0, device=device)


def state(draw: Draw, numel: int) -> list[Tensor]:
    """Values, moments; the second is not negative."""
    values, mean, square = (draw.values(numel, torch.float32) for _ in range(3))
    return [values, mean, square.abs()]


@dataclass(frozen=True)
class Shards:
    """Shards of AdamW with different sizes, rules and low-precision dtypes."""

    tensors: list[list[Tensor]]
    """Values, gradients, means, square means and low-precision values, by shard."""
    rules: list[ops.AdamWRule]

    @staticmethod
    def draw(
        draw: Draw, sizes: list[int], dtypes: list[torch.dtype | None], shift: int = 0
    ) -> Shards:
        """Shards that begin `shift` elements after an aligned address."""

        def shard(numel: int, dtype: torch.dtype | None) -> list[Tensor]:
            values, mean, square = state(draw, numel + shift)
            gradient = draw.values(numel + shift, torch.float32)
            low = ABSENT.to(draw.device)
            if dtype is not None:
                low = values.to(dtype)
                low[::3] = 5.0  # written since the values were rounded
            return [tensor[shift:] for tensor in (values, gradient, mean, square, low)]

        choose, hundreds = draw.random.choice, draw.random.randrange
        rules = [
            ops.AdamWRule(
                lr=choose([1e-3, 3e-4]),
                beta1=choose([0.0, 0.3, 0.6, 0.9]),
                beta2=choose([0.9, 0.999]),
                eps=choose([1e-8, 1e-5]),
                weight_decay=choose([0.0, 0.1]),
                step=float(choose([1, 2, 1000 + hundreds(100)])),
                maximize=choose([False, True]),
            )
            for _ in sizes
        ]
        return Shards([shard(*of) for of in zip(sizes, cycle(dtypes), strict=False)], rules)

    def copy(self) -> Shards:
        """The same values at the same distances from aligned addresses."""
        return Shards([[moved(tensor) for tensor in shard] for shard in self.tensors], self.rules)

    def arguments(self) -> tuple[list[Tensor], ...]:
        """Lists by role, in the order of the operator."""
        return tuple(map(list, zip(*self.tensors, strict=True))) or ([],) * 5

    def flat(self) -> list[Tensor]:
        """All tensors, one shard after the other."""
        return list(chain.from_iterable(self.tensors))

    def numbers(self) -> list[float]:
        """All rules, as the schema has them."""
        return [float(number) for rule in self.rules for number in rule]

    def round_down_to_bf16(self) -> None:
        """Change the values behind bf16 copies to some that truncation rounds as chips do.

        The kernel compares the copy with the rounded value, so one unit makes it a written one.
        """
        for values, *_, low in self.tensors:
            if low.dtype is torch.bfloat16:
                written = values.to(low.dtype) != low
                values.view(torch.int32).bitwise_and_(~0x8000)  # the first of the bits cut off
                low.copy_(torch.where(written, low, values.to(low.dtype)))


def totals_of(draw: Draw, rows: int) -> Tensor:
    """Exact sums of squares as ranks exchange them: one row each, with columns after the words."""
    totals = torch.zeros(rows, 64, dtype=torch.int64, device=draw.device)
    totals[:, ops.EXACT_WORDS :] = -1
    for row in totals:
        values = torch.ldexp(
            torch.rand(500, generator=draw.generator),
            torch.randint(-149, 120, (500,), generator=draw.generator),
        )
        plain.exact_sum_(row[: ops.EXACT_WORDS], [values.to(draw.device)])
    return totals


def zero_subnormal_bf16(arguments: Sequence[Any]) -> None:
    tensors = chain.from_iterable(
        given if isinstance(given, list) else [given] for given in arguments
    )
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.dtype is torch.bfloat16:
            tensor.masked_fill_(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0.0)


@dataclass(frozen=True)
class Implementation:
    """An implementation of the operators, and how its results are compared."""

    operators: Any
    """Has a function for each operator, which takes all its arguments."""
    device: str = "cpu"
    rounds_bf16: bool = True
    """False: as Triton's interpreter, it truncates to bf16, so one unit may differ, and reads
    subnormal values as others, so it gets none."""

    def check(self, name: str, *arguments: Any, written: Sequence[int] = (0,)) -> None:
        """Compare what an operator returns and writes with plain PyTorch.

        `written`: the places of arguments that it writes to. They stay as they are: each
        implementation gets copies.
        """
        if not self.rounds_bf16:
            zero_subnormal_bf16(arguments)
        results = []
        for function in (getattr(self.operators, name), plain.FUNCTIONS[name]):
            copies = {
                id(arguments[place]): moved(arguments[place])
                for place in written
                if arguments[place] is not None
            }
            returned = function(
                *(
                    [copies.get(id(one), one) for one in given]
                    if isinstance(given, list)
                    else copies.get(id(given), given)
                    for given in arguments
                )
            )
            results.append([*copies.values(), *([] if returned is None else [returned])])
        for actual, expected in zip(*results, strict=True):
            self.assert_same(actual, expected)

    def check_adamw(
        self, shards: Shards, scale: Tensor | None = None, found: Tensor | None = None
    ) -> None:
        """Compare one step on all shards with plain PyTorch."""
        if not self.rounds_bf16:
            shards.round_down_to_bf16()
        actual, expected = shards.copy(), shards.copy()
        for own, operators in ((actual, self.operators), (expected, plain)):
            operators.adamw_(*own.arguments(), own.numbers(), scale, found)
        for one, other in zip(actual.flat(), expected.flat(), strict=True):
            self.assert_same(one, other)

    def assert_same(self, actual: Tensor, expected: Tensor) -> None:
        if actual.dtype is torch.bfloat16 and not self.rounds_bf16:
            torch.testing.assert_close(actual, expected, rtol=BF16_ULP, atol=1e-38, equal_nan=True)
        elif actual.dtype in INTEGERS:
            assert_same_bits(actual, expected)
        else:
            assert_same_value(actual, expected)


# The cases


def pack(made: Implementation, dtype: torch.dtype, accumulate: bool) -> None:
    """Small tensors with gaps between them; then tiles within one tensor."""
    for seed, count in enumerate([0, 1, 3, 20, 3, 20]):
        draw = Draw(seed, made.device)
        grads, offsets, numel = draw.tensors(count)
        weight = draw.random.choice([1.0, 1 / 3, 0.0, -2.5, 1e-8])
        made.check("pack_", draw.values(numel, dtype), grads, offsets, weight, accumulate)
    numel = 3 * 4096 + 70
    for shift, gradient in zip((0, 1, 4), DTYPES, strict=True):
        draw = Draw(shift, made.device)
        grads = [draw.values(numel - 100, gradient), draw.values(50, torch.float16)]
        bucket = shifted(draw.values(numel, dtype), shift)
        made.check("pack_", bucket, grads, [shift, numel - 60], 1 / 3, accumulate)


def rank_sum(made: Implementation, dtype: torch.dtype, accumulate: bool) -> None:
    """With and without block sums; a rank's own slice is in other memory, or is the result's."""
    few = ((1, 0, 0), (2, 1, 1), (5, 64, 8), (1, 1000, 1))
    for ranks, numel, shift in (*few, (2, 4100, 0), (5, 4100, 1), (33, 70, 0)):
        draw = Draw(numel + ranks, made.device)
        received = draw.values(ranks * (numel + shift), dtype).view(ranks, -1)
        parts = [part[:numel] for part in received]
        parts[ranks // 2] = parts[ranks // 2].clone()
        out = shifted(draw.values(numel, torch.float32), shift % 2)
        for sums in (None, new_sums(numel, made.device)):
            made.check("rank_sum_", out, parts, accumulate, sums, written=(0, 3))
            if dtype is torch.float32:
                own = [out if rank == ranks // 2 else part for rank, part in enumerate(parts)]
                made.check("rank_sum_", out, own, accumulate, sums, written=(0, 3))


def encode(made: Implementation, bits: int) -> None:
    for seed, (count, shift) in enumerate(((0, 0), (3, 2), (12, 0))):
        draw = Draw(seed, made.device)
        tensors, offsets, end = draw.tensors(count)
        tensors.append(draw.values(9000, DTYPES[seed]))  # whole tiles, and parts of others
        offsets.append(end + shift)
        size = codec.encoded_bytes(end + shift + 9000, bits)
        codes = shifted(torch.full((size,), 99, dtype=torch.uint8, device=made.device), shift)
        made.check("encode_", codes, tensors, offsets, 1 / 3, bits, 2**33 - 640, seed)


def decode_sum(made: Implementation, bits: int, dtype: torch.dtype, accumulate: bool) -> None:
    for numel, ranks in ((0, 1), (1, 3), (65, 1), (3000, 3), (5000, 1)):
        draw = Draw(numel, made.device)
        received = []
        for rank in range(ranks):
            size = codec.encoded_bytes(numel, bits)
            codes = torch.empty(size, dtype=torch.uint8, device=made.device)
            plain.encode_(codes, [draw.values(numel, torch.float32)], [0], 1.0, bits, 0, rank)
            received.append(codes)
        received[-1] = shifted(received[-1], 2)
        out = shifted(draw.values(numel, dtype), ranks // 2)
        sums = new_sums(numel, made.device) if dtype is torch.float32 else None
        made.check("decode_sum_", out, received, bits, accumulate, sums, written=(0, 4))


def block_sums(made: Implementation, dtype: torch.dtype) -> None:
    for numel in (0, 1, 63, 64, 65, 2048, 5000):
        for shift in (0, 1, 2):
            flat = shifted(Draw(numel, made.device).values(numel, dtype), shift)
            made.check("block_sums_of_squares", flat, written=())


def exact_sum(made: Implementation) -> None:
    for sizes in ([], [0], [1], [64], [4096], [4097], [10_000], [0, 5, 4097, 0, 64, 1]):
        parts = [Draw(numel, made.device).values(numel, torch.float32) for numel in sizes]
        made.check("exact_sum_", torch.arange(plain.EXACT_WORDS, device=made.device), parts)


def exact_norm(made: Implementation) -> None:
    for rows in (0, 1, 2, 9):
        made.check("exact_norm", totals_of(Draw(rows, made.device), rows), written=())


def clip_coefficient(made: Implementation) -> None:
    for norm in torch.tensor(NORMS, dtype=torch.float64, device=made.device):
        for scale in (None, torch.tensor(1 / 1024, dtype=torch.float64, device=made.device)):
            made.check("clip_coefficient", norm, 0.1, scale, written=())


def adamw(made: Implementation, rounded: torch.dtype | None, found: float | None) -> None:
    """One shard; the gradients are scaled if there is a flag."""
    flag = None if found is None else torch.tensor(found, device=made.device)
    scale = None if found is None else torch.tensor([0.25], device=made.device)
    for numel, shift in ((0, 0), (1, 1), (1024, 0), (3001, 1), (3001, 4)):
        shards = Shards.draw(Draw(numel, made.device), [numel], [rounded], shift)
        made.check_adamw(shards, scale, flag)


def adamw_of_many_shards(made: Implementation, shift: int) -> None:
    for sizes in ([0, 0], [5, 0, 1024, 2049, 0, 64, 1, 3000]):
        draw = Draw(sum(sizes), made.device)
        shards = Shards.draw(draw, sizes, [torch.float16, None, *DTYPES], shift)
        made.check_adamw(shards, None, torch.zeros(1, device=made.device))


def named(case: Callable[..., None], *values: Any) -> tuple[str, Callable[[Implementation], None]]:
    words = (str(value).removeprefix("torch.") for value in values)
    return " ".join([case.__name__, *words]), lambda made: case(made, *values)


ADDED = [(dtype, accumulate) for dtype in DTYPES for accumulate in (False, True)]
CASES: dict[str, Callable[[Implementation], None]] = dict(
    [
        *(named(pack, *values) for values in ADDED),
        *(named(rank_sum, *values) for values in ADDED),
        *(named(encode, bits) for bits in (8, 4)),
        *(named(decode_sum, bits, *values) for bits in (8, 4) for values in ADDED),
        *(named(block_sums, dtype) for dtype in DTYPES),
        *(named(case) for case in (exact_sum, exact_norm, clip_coefficient)),
        *(named(adamw, rounded, 0.0) for rounded in (None, *DTYPES)),
        *(named(adamw, torch.bfloat16, found) for found in (None, 1.0)),
        *(named(adamw_of_many_shards, shift) for shift in (0, 1)),
    ]
)

"""What is kept of buffers, to compare their changes on the ranks, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from poplar.zero.checks import forward_state
from poplar.zero.checks.forward_state import ForwardStateCheck, _differ, _Digest
from poplar.zero.preserved_state import model_preserved

NUMEL = 61 * 1000 + 7


class Largest(TorchDispatchMode):
    """Records the bytes of the largest new memory."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self._known = known.untyped_storage().data_ptr()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() != self._known:
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.complex64])
def test_nothing_of_the_size_of_a_buffer_is_made(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(forward_state, "_ROWS", 16)
    buffer = torch.zeros(NUMEL, dtype=dtype)
    with Largest(buffer) as largest:
        before = _Digest.of(buffer, None)
        assert _Digest.of(buffer, before) is before
        buffer[5] = 3
        assert _Digest.of(buffer, before).change(before) is not None
    assert largest.bytes < buffer.nbytes / 5


class Operators(TorchDispatchMode):
    """Counts operators by name, except views and copies on the host."""

    ON_HOST = ("as_strided", "clone", "detach", "view")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found[name] += name not in self.ON_HOST
        return func(*args, **(kwargs or {}))


def one_of_two() -> Any:
    """The control channel of two ranks that have the same."""
    return SimpleNamespace(
        group=SimpleNamespace(size=2), exchange_objects=lambda own, what: [own, own]
    )


def operators_of_two_steps(norms: int) -> Counter[str]:
    model = nn.Sequential(*(nn.BatchNorm1d(64) for _ in range(norms))).eval()
    check = ForwardStateCheck(model, one_of_two(), allowed=False)
    with Operators() as operators:
        for _ in range(2):
            check.open()
            check.look()
    return operators.found


def test_buffers_that_do_not_change_are_read_together() -> None:
    found = operators_of_two_steps(norms=100)
    assert found == operators_of_two_steps(norms=2)
    assert found["cat"] == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.bool])
def test_tensors_that_are_read_together_keep_their_values(dtype: torch.dtype) -> None:
    tensors = [torch.arange(3, dtype=torch.int8), torch.eye(3).to(dtype).t(), torch.zeros(0, 2)]
    tensors += [torch.ones((), dtype=dtype), torch.arange(9).view(3, 3)[:, ::2]]
    for own, copy in zip(tensors, forward_state._on_host(tensors), strict=True):
        torch.testing.assert_close(copy, own, rtol=0, atol=0)


Write = Callable[[Tensor], object]


def change(dtype: torch.dtype, write: Write) -> tuple[float, Any]:
    torch.manual_seed(0)
    buffer = (torch.randn(NUMEL) * 10).to(dtype)
    before = _Digest.of(buffer, None)
    write(buffer)
    found = _Digest.of(buffer, before).change(before)
    assert found is not None
    return found


def differ(dtype: torch.dtype, one: Write, other: Write) -> bool:
    (tolerance, first), (_, second) = change(dtype, one), change(dtype, other)
    return _differ(first, second, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("place", [61, 1, 32, NUMEL - 1])
def test_one_element_more_is_told_from_one_elsewhere(dtype: torch.dtype, place: int) -> None:
    def add(at: int) -> Write:
        return lambda buffer: buffer[at].add_(4)

    assert differ(dtype, add(0), add(place))
    assert not differ(dtype, add(place), add(place))


@pytest.mark.parametrize("numel", [122, 5430, NUMEL])
def test_sums_of_a_change_have_the_norm_of_its_elements(numel: int) -> None:
    """Also if the elements change alike, as those of moving averages of similar values do."""
    ones = torch.ones(numel)
    norm = float(_Digest.of(ones, None).sums.norm())
    assert norm == pytest.approx(numel**0.5, rel=0.5)


def test_an_infinity_hides_no_other_element() -> None:
    def maximum(value: float) -> Write:
        return lambda buffer: buffer.copy_(
            torch.cat([torch.tensor([-torch.inf]), buffer[1:] + value])
        )

    assert differ(torch.float32, maximum(1.0), maximum(2.0))
    assert not differ(torch.float32, maximum(1.0), maximum(1.0))


@pytest.mark.parametrize(
    "buffer",
    [
        torch.eye(2).to_sparse(),
        torch.fft.rfft(torch.ones(4)).conj(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "conjugate", "quantized"],
)
def test_buffers_without_plain_elements_are_not_compared_but_preserved(buffer: Tensor) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", buffer)
    check = ForwardStateCheck(model, one_of_two(), allowed=False)
    check.open()
    check.look()
    with model_preserved(model, torch.device("cpu")):
        pass


def test_rounding_is_told_from_other_values() -> None:
    for factor, differs in ((1 + 1e-5, False), (1.1, True)):
        moved = torch.randn(NUMEL)
        assert (
            differ(
                torch.float32,
                lambda buffer, moved=moved: buffer.add_(moved),
                lambda buffer, moved=moved, factor=factor: buffer.add_(moved * factor),
            )
            is differs
        )


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_a_single_number_that_counts_nothing_is_a_change(value: float) -> None:
    before = _Digest.of(torch.zeros(1), None)
    assert _Digest.of(torch.full((1,), value), before).change(before) is not None

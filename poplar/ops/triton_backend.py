"""The CUDA operators in Triton, used where the C++ library was not built; they need no nvcc.

They give the bits of plain PyTorch. Triton supports only capability 8.0 and higher, so on older
devices a self-test on small tensors decides. If it fails, or if no kernel can be launched (Triton
needs a C compiler and Python's headers once), plain PyTorch is used, with a warning.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from poplar.ops import plain

SUPPORTED_CAPABILITY = (8, 0)
"""The lowest compute capability that Triton supports."""


def is_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _operator(name: str) -> Callable[..., Any]:
    """An operator by the provider for the device of its tensors."""

    def run(*arguments: Any) -> Any:
        plain.CHECKS[name](*arguments)
        first = arguments[0]
        tensors = [first] if isinstance(first, Tensor) else first
        # No tensors: there is nothing to update.
        return getattr(_provider_for(tensors[0]), name)(*arguments) if tensors else None

    return run


FUNCTIONS = {name: _operator(name) for name in plain.CHECKS}


class _KernelsOnDevice:
    """Launches the kernels on one device, whichever device is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def launch(*arguments: Any) -> Any:
            from poplar import kernels  # imported late, because importing Triton is slow

            with torch.cuda.device(self._device):
                return getattr(kernels, name)(*arguments)

        return launch


def _provider_for(tensor: Tensor) -> Any:
    """The provider for a tensor's device: the kernels, or plain PyTorch."""
    return _provider_on(tensor.device)


@functools.cache
def _provider_on(device: torch.device) -> Any:
    kernels = _KernelsOnDevice(device)
    supported = torch.cuda.get_device_capability(device) >= SUPPORTED_CAPABILITY
    reason = launch_test(kernels, device) if supported else self_test(kernels, device)
    if not reason:
        return kernels
    warnings.warn(
        f"Triton's kernels do not run on {torch.cuda.get_device_name(device)} ({reason}); using "
        "plain PyTorch, which is slower. Build Poplar with nvcc to get the C++ operators",
        stacklevel=4,
    )
    return plain


def launch_test(kernels: Any, device: torch.device) -> str:
    """Why no kernel can be launched; empty if one can."""
    try:
        kernels.block_sums_of_squares(torch.zeros(64, device=device))
    except Exception as error:  # a missing compiler raises many types of errors
        return f"launch failed: {type(error).__name__}: {error}"
    return ""


def self_test(kernels: Any, device: torch.device) -> str:
    """Which kernels are wrong on small tensors, or why they fail; empty if all are right."""
    try:
        wrong = [name for name, same in _compare_all(kernels, device) if not same]
    except Exception as error:  # an unsupported chip raises many types of errors
        return f"launch failed: {type(error).__name__}: {error}"
    return f"wrong results of {', '.join(wrong)}" if wrong else ""


def _compare_all(kernels: Any, device: torch.device) -> list[tuple[str, bool]]:
    generator = torch.Generator("cpu").manual_seed(0)

    def values(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(numel, generator=generator, device="cpu").to(dtype).to(device)

    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grads = [values(1500), values(70, torch.bfloat16), values(999, torch.float16)]
        bucket, parts = values(3000, dtype), values(3 * 3000, dtype).view(3, 3000).unbind()
        for accumulate in (False, True):
            pack = (grads, [3, 1600, 1700], 1 / 3, accumulate)
            found.append(
                ("pack_", _same_bits(kernels.pack_, plain.pack_, bucket, pack, sums=False))
            )
            add = (parts, accumulate)
            found.append(
                ("rank_sum_", _same_bits(kernels.rank_sum_, plain.rank_sum_, values(3000), add))
            )
        masters, scale = values(3000), values(1)
        rounded = masters.to(dtype)
        rounded[::3] = 5.0  # written since the masters were rounded
        state = [values(3000), values(3000), values(3000).abs(), rounded]
        ours, theirs = _adamw_step(kernels, scale), _adamw_step(plain, scale)
        found.append(("adamw_", _same_bits(ours, theirs, masters, state, sums=False)))
    total = torch.zeros(plain.EXACT_WORDS, dtype=torch.int64, device=device)
    ours, theirs = _exact_sum_of_two(kernels), _exact_sum_of_two(plain)
    found.append(("exact_sum_", _same_bits(ours, theirs, total, [values(3000)], sums=False)))
    plain.exact_sum_(total, [values(3000).square()])
    norm = plain.exact_norm(total.view(1, -1))
    found.append(("exact_norm", torch.equal(kernels.exact_norm(total.view(1, -1)), norm)))
    for factor in (None, norm.reciprocal()):
        one, other = (o.clip_coefficient(norm, 0.1, factor) for o in (kernels, plain))
        found.append(("clip_coefficient", torch.equal(one, other)))
    return found


def _adamw_step(operators: Any, scale: Tensor) -> Callable[..., None]:
    """A step on one shard."""
    rule = [1e-3, 0.9, 0.999, 1e-8, 0.1, 3.0, False]

    def step(*shard: Tensor) -> None:
        operators.adamw_(*([tensor] for tensor in shard), rule, scale, None)

    return step


def _exact_sum_of_two(operators: Any) -> Callable[..., None]:
    """An exact sum of two tensors."""
    return lambda total, part: operators.exact_sum_(total, [part, part[:70]])


def _same_bits(
    one: Callable[..., None],
    other: Callable[..., None],
    out: Tensor,
    arguments: Sequence[Any],
    sums: bool = True,
) -> bool:
    """Whether two functions write the same bits to their outputs."""
    results = []
    for function in (one, other):
        fresh = [
            argument.clone() if isinstance(argument, Tensor) else argument
            for argument in (out, *arguments)
        ]
        if sums:
            fresh.append(torch.empty(-(-out.numel() // plain.ALIGNMENT), device=out.device))
        function(*fresh)
        results.append([argument for argument in fresh if isinstance(argument, Tensor)])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))

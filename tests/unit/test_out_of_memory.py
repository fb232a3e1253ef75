"""What counts as out of memory, and what plans and profiles learn from it."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import weakref

import pytest
import torch

from poplar import Plan
from poplar.system.out_of_memory import free_failed_pass, free_frames, is_out_of_memory
from poplar.values.errors import PoplarError
from poplar.values.profile import BatchPoint, DeviceProfile

REAL = """
import resource, sys, torch
from poplar import ops
from poplar.system.out_of_memory import is_out_of_memory
wide, bucket = torch.zeros(1 << 13, 1 << 12), torch.empty(1 << 25)
many = torch.empty(1 << 31, dtype=torch.bfloat16)
status = open("/proc/self/status").read()
held = int(status.split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + (64 << 20),) * 2)
small = torch.ones(1 << 20, requires_grad=True)
attempts = {
    "empty": lambda: torch.empty(1 << 28),
    "storage": lambda: torch.empty(0).untyped_storage().resize_(1 << 30),
    "backward": lambda: (small * small).expand(256, -1).clone().sum().backward(),
    "bytes": lambda: bytearray(1 << 30),
    "copy in an operator": lambda: ops.pack_(bucket, [wide.t()], [0], 1.0),
    "result of an operator": lambda: ops.block_sums_of_squares(many),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except Exception as error:
        print(f"{name}:", type(error).__name__, is_out_of_memory(error))
    else:
        print(f"{name}: no error")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits memory on Linux")
def test_real_failures_of_a_limited_process_are_recognized() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True)
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert found == {
        "empty": "RuntimeError True",
        "storage": "RuntimeError True",
        "backward": "RuntimeError True",
        "bytes": "MemoryError True",
        "copy in an operator": "RuntimeError True",
        "result of an operator": "RuntimeError True",
    }


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("std::bad_alloc"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("std::bad_alloc"), False),
        (PoplarError("rank 1: DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_errors_that_say_that_memory_ran_out(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_frames_of_an_error_and_its_causes_are_freed() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def inner() -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise MemoryError

    def outer() -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        try:
            inner()
        except MemoryError as error:
            raise RuntimeError("std::bad_alloc") from error

    with pytest.raises(RuntimeError) as caught:
        outer()
    assert all(reference() is not None for reference in held)
    free_frames(caught.value)
    assert all(reference() is None for reference in held)


class Held(torch.autograd.Function):
    """Notes when its node is freed, and fails in the backward if it has to."""

    @staticmethod
    def forward(ctx, x, freed, fails):
        ctx.fails = fails
        weakref.finalize(ctx, freed.append, True)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise RuntimeError("failed")
        return gradient, None, None


@pytest.mark.parametrize("branches", [2, 5])
def test_nodes_that_wait_for_a_failed_backward_are_freed(branches: int):
    freed: list[bool] = []

    def run() -> None:
        x = torch.ones(3, requires_grad=True)
        # The last branch is the first in the backward; all others are ready by then.
        parts = [Held.apply(x, freed, at == branches - 1) for at in range(branches)]
        sum(parts).sum().backward()

    with pytest.raises(RuntimeError, match="failed") as caught:
        run()
    assert len(freed) < branches
    free_failed_pass(caught.value)
    assert len(freed) == branches


@pytest.mark.parametrize("seed", range(50))
def test_plan_with_smaller_batches_has_the_same_samples(seed: int) -> None:
    generator = random.Random(seed)
    stage, ranks, passes = generator.randrange(4), generator.randint(1, 4), generator.randint(1, 3)
    sizes = [tuple(generator.randint(0, 9) for _ in range(passes)) for _ in range(ranks)]
    sizes[0] = (1, *sizes[0][1:])
    plan = Plan(
        stage=stage,
        global_batch=sum(map(sum, sizes)),
        micro_batches=tuple(sizes),
        shares=(1 / ranks,) * ranks,
        prediction={"step_seconds": 1.0},
    )
    limits = {rank: generator.randint(1, 9) for rank in range(ranks) if generator.random() < 0.6}
    cut = plan.with_largest_batches(limits)
    assert cut.prediction is None
    for rank, own in enumerate(cut.micro_batches):
        assert sum(own) == plan.samples(rank)
        assert max(own) <= limits.get(rank, 9)
    needed = [
        [-(-size // limits[rank]) if rank in limits and size else 1 for size in own]
        for rank, own in enumerate(sizes)
    ]
    if stage >= 2:  # a pass is cut on all ranks into as many parts as the rank that needs most
        assert len(cut.micro_batches[0]) == sum(map(max, zip(*needed, strict=True)))
    else:
        assert [len(own) for own in cut.micro_batches] == list(map(sum, needed))
    unchanged = plan.with_largest_batches(dict.fromkeys(range(ranks), 9))
    assert unchanged == plan


def test_parts_of_a_pass_stay_balanced_between_ranks() -> None:
    plan = Plan(
        stage=3, global_batch=16, micro_batches=((8,), (5,), (3,), (0,)), shares=(0.25,) * 4
    )
    cut = plan.with_largest_batches({1: 2})
    assert cut.micro_batches == ((2, 3, 3), (1, 2, 2), (1, 1, 1), (0, 0, 0))


@pytest.mark.parametrize(("batches", "message"), [({4: 1}, "rank 4"), ({0: 0}, r"batches\[0\]")])
def test_wrong_limits_are_named(batches: dict[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.manual("2,2", stage=1).with_largest_batches(batches)


def test_profile_takes_the_largest_batch_that_fits() -> None:
    points = tuple(
        BatchPoint(batch=batch, seconds=float(batch), activation_bytes=100 * batch)
        for batch in (2, 4, 16)
    )
    device = DeviceProfile(name="x", memory_bytes=10_000, points=points, optimizer_seconds=0.1)
    limited = device.with_largest_batch(10)
    assert limited.max_batch == 10
    assert (limited.seconds(10), limited.activation_bytes(10)) == (10.0, 1000.0)
    assert limited.points[:2] == points[:2]
    assert device.with_largest_batch(1).max_batch == 1
    assert device.with_largest_batch(99) == device

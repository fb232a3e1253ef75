"""Memory of a CUDA device as the profiler counts it, on a fake allocator and driver."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from records import cluster
from torch import Tensor, nn

from poplar.profiler.cluster_profiler import Profiler, memory_budget
from poplar.profiler.memory import batch_bytes, model_bytes, pass_bytes
from poplar.profiler.memory_budget import MemoryBudget
from poplar.profiler.passes import Passes
from poplar.profiler.session import equal_entries
from poplar.profiler.unit_hooks import TrainedUnit
from poplar.system import devices, host_limits, nvml
from poplar.values.profile import MEMORY_RESERVE

CUDA = torch.device("cuda", 0)
MIB = 1 << 20
TOTAL = 1000 * MIB


@dataclass
class FakeCuda:
    """A device of 1000 MiB, the allocator of this process, and other processes."""

    allocated: int = 0
    cached: int = 0
    """Reserved by the allocator and not allocated."""
    driver: int = 0
    """Held by this process outside of torch's allocator."""
    others: int = 0
    peak: int = 0
    highest: int = 0
    """Most allocated bytes since the peak was reset."""
    empties: int = 0

    @property
    def reserved(self) -> int:
        return self.allocated + self.cached

    def allocate(self, size: int, *, wasted: int = 0) -> None:
        """Allocate; `wasted` bytes more are reserved, because of fragmentation."""
        self.allocated += size
        self.cached += wasted
        self.peak = max(self.peak, self.reserved)
        self.highest = max(self.highest, self.allocated)

    def free(self, size: int) -> None:
        """Freed memory stays in the cache."""
        self.allocated -= size
        self.cached += size

    def empty_cache(self) -> None:
        self.cached = 0
        self.empties += 1

    def reset_peak(self, device: torch.device) -> None:
        self.peak, self.highest = self.reserved, self.allocated

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return TOTAL - self.reserved - self.driver - self.others, TOTAL


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name, function in {
        "synchronize": lambda device: None,
        "empty_cache": fake.empty_cache,
        "reset_peak_memory_stats": fake.reset_peak,
        "memory_allocated": lambda device: fake.allocated,
        "memory_reserved": lambda device: fake.reserved,
        "max_memory_reserved": lambda device: fake.peak,
        "max_memory_allocated": lambda device: fake.highest,
        "mem_get_info": fake.mem_get_info,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(
        devices, "describe", lambda device: SimpleNamespace(others_bytes=fake.others)
    )
    monkeypatch.setattr(devices, "_nvml", lambda device: nvml.NvmlDevice())
    monkeypatch.setattr(devices, "_held_by_others", lambda *_: fake.others)
    return fake


def test_fragmented_pass_needs_what_is_reserved(cuda: FakeCuda):
    cuda.allocate(100 * MIB)

    def run() -> None:
        cuda.allocate(40 * MIB, wasted=10 * MIB)
        cuda.free(40 * MIB)

    assert pass_bytes(run, CUDA).peak == 50 * MIB


def test_fragmentation_counts_for_every_unit_in_proportion(cuda: FakeCuda):
    cuda.allocate(100 * MIB)
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    first.register_post_accumulate_grad_hook(lambda _: cuda.free(30 * MIB))

    def run() -> None:
        cuda.allocate(40 * MIB, wasted=10 * MIB)
        (first * 1.0).sum().backward()  # its unit ends with 10 MiB alive
        (second * 1.0).sum().backward()
        cuda.free(10 * MIB)

    found = pass_bytes(run, CUDA, [TrainedUnit([p], resident=False) for p in (second, first)])
    assert found.peak == 50 * MIB
    gradient = 4  # bytes, of the one element; they are taken out
    for value, size in zip((*found.during, *found.after), (10, 40, 10, 10), strict=True):
        assert 1.25 * size * MIB - 2 * gradient <= value <= 1.25 * size * MIB


def test_cache_of_earlier_passes_does_not_count(cuda: FakeCuda):
    cuda.allocate(300 * MIB)
    cuda.free(200 * MIB)
    assert pass_bytes(lambda: cuda.allocate(5 * MIB), CUDA).peak == 5 * MIB
    assert cuda.cached == 0


def test_memory_between_tensors_that_stay_counts_as_activations(cuda: FakeCuda, monkeypatch):
    """The allocator cannot return it, and a plan can use it only for small tensors."""
    cuda.allocate(100 * MIB, wasted=3 * MIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert pass_bytes(lambda: None, CUDA).peak == 3 * MIB


def test_batch_on_the_device_is_linear_in_its_samples():
    device = torch.device("meta")  # any device that is not the CPU
    example = {
        "image": torch.zeros(2, 3, 8, 8, device=device),
        "label": torch.zeros(2, dtype=torch.int64, device=device),
        "path": ["a", "b"],
        "on_host": torch.zeros(2, 1000),
    }
    passes = Passes(nn.Linear(1, 1), lambda model, batch: None, example, device)
    each = 3 * 8 * 8 * 4 + 8
    assert [batch_bytes(passes.batch(size), device) for size in (1, 2, 7)] == [
        each,
        2 * each,
        7 * each,
    ]
    assert batch_bytes(example, torch.device("cpu")) == 0


def test_sparse_tensors_of_a_batch_count_by_their_indices_and_values():
    device = torch.device("meta")
    indices = torch.zeros(2, 5, dtype=torch.int64, device=device)
    values = torch.zeros(5, device=device)
    matrix = torch.sparse_coo_tensor(indices, values, (9, 9))
    assert batch_bytes({"adjacency": matrix}, device) == 2 * 5 * 8 + 5 * 4


def test_tensors_inside_of_objects_of_a_batch_count():
    x, y = (torch.zeros(size, device="meta") for size in (10, 3))
    batch = [SimpleNamespace(x=x, y=y, of=torch.zeros(5)), x]
    assert batch_bytes(batch, torch.device("meta")) == (10 + 3) * 4


def test_shared_parameters_buffers_and_gradients_count_once():
    on_host = torch.device("cpu")
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(10))
    assert model_bytes(model, on_host) == 4 * 16 + 4 * 10
    model[0].weight.grad = torch.zeros(4, 4)
    assert model_bytes(model, on_host) == 2 * 4 * 16 + 4 * 10
    assert model_bytes(model, CUDA) == 0


class OnDevice(Tensor):
    """A tensor in host memory that says that it is on the device."""

    device = property(lambda self: CUDA)  # type: ignore[assignment]


def model_on_device() -> nn.Module:
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    model.weight = nn.Parameter(model.weight.detach().as_subclass(OnDevice))
    return model


def session(model: nn.Module, sharing: int = 1) -> Any:
    """A session of one rank on the device, which so many ranks share."""
    return SimpleNamespace(
        device=CUDA,
        asynchronous=True,
        ranks_on_this_host=1,
        ranks_sharing_memory=sharing,
        group=SimpleNamespace(rank=0),
        job=SimpleNamespace(model=model, profile_seconds=10.0, stages=(0,)),
        memory_limit=None,
        on_all_ranks=lambda work, doing: [work()],
    )


def budget(model: nn.Module) -> MemoryBudget:
    return memory_budget(session(model))


def test_what_is_not_the_model_is_held(cuda: FakeCuda):
    model = model_on_device()
    cuda.allocate(4 * MIB)
    cuda.driver, cuda.others = 300 * MIB, 50 * MIB
    assert budget(model) == MemoryBudget(950 * MIB, 300 * MIB)
    cuda.allocate(70 * MIB)  # another tensor of the user
    assert budget(model).held_bytes == 370 * MIB
    cuda.free(70 * MIB)  # cached
    assert budget(model).held_bytes == 300 * MIB


def test_a_model_in_host_memory_takes_nothing_from_what_is_held(cuda: FakeCuda):
    model = nn.Linear(1024, 1024, bias=False)
    cuda.driver = 3 * MIB
    assert budget(model).held_bytes == 3 * MIB
    cuda.allocate(1 * MIB)
    model.register_buffer("table", torch.zeros(MIB // 4).as_subclass(OnDevice))
    assert budget(model).held_bytes == 3 * MIB


def test_budgets_of_ranks_that_share_a_device_do_not_exceed_it(cuda: FakeCuda):
    model = model_on_device()
    cuda.driver, cuda.others = 300 * MIB, 100 * MIB + 50 * MIB  # another rank's and a stranger's
    own = memory_budget(session(model, sharing=2))
    cuda.driver, cuda.others = 100 * MIB, 300 * MIB + 50 * MIB
    other = memory_budget(session(model, sharing=2))
    assert own.memory_bytes - other.memory_bytes == 200 * MIB
    assert own.memory_bytes + other.memory_bytes == TOTAL - 50 * MIB


def test_ranks_share_memory_by_host_and_device():
    entries = [
        {"host": host, "device": device}
        for host, device in (("a", "A100 GPU-1"), ("a", "A100 GPU-1"), ("a", "A100 GPU-2"))
    ]
    entries.append({"host": "b", "device": "A100 GPU-1"})
    shared = [equal_entries(own, entries, "host", "device") for own in entries]
    assert shared == [2, 2, 1, 1]


def test_budget_tightens_after_collectives_and_first_passes(cuda: FakeCuda):
    model = model_on_device()
    cuda.allocate(4 * MIB)
    cuda.driver = 200 * MIB
    before = budget(model)
    cuda.driver += 120 * MIB  # NCCL's buffers and loaded kernels
    cuda.others = 30 * MIB
    later = budget(model)
    assert before.tightened(later) == MemoryBudget(970 * MIB, 320 * MIB)
    assert later.tightened(before) == MemoryBudget(970 * MIB, 320 * MIB)
    assert before.activation_bytes - before.tightened(later).activation_bytes == pytest.approx(
        30 * MIB * (1 - MEMORY_RESERVE) + 120 * MIB
    )


def profiler(model: nn.Module) -> Profiler:
    made = Profiler.__new__(Profiler)
    made.session = session(model)
    made._budgets = made._read_budgets()
    return made


def test_profile_holds_what_the_driver_has_allocated_meanwhile(cuda: FakeCuda):
    model = model_on_device()
    cuda.allocate(4 * MIB)
    cuda.driver = 200 * MIB
    measuring = profiler(model)
    cuda.driver = 320 * MIB
    cuda.cached = 500 * MIB  # left by passes: returned before memory is read
    (device,) = measuring.with_later_memory(cluster((10.0,), ["GPU"])).devices
    assert (device.memory_bytes, device.held_bytes) == (TOTAL, 320 * MIB)
    assert cuda.empties == 2


def test_cached_profile_keeps_what_was_held_after_everything_had_run(cuda: FakeCuda):
    model = model_on_device()
    cuda.allocate(4 * MIB)
    cuda.driver, cuda.others = 200 * MIB, 100 * MIB
    known = cluster((10.0,), ["GPU"])
    measured = replace(known.devices[0], memory_bytes=TOTAL, held_bytes=320 * MIB)
    known = replace(known, devices=(measured,))
    (device,) = profiler(model).with_present_memory(known).devices
    assert (device.memory_bytes, device.held_bytes) == (900 * MIB, 320 * MIB)


@pytest.mark.parametrize("seconds", [0.1, None])
def test_cached_profile_has_the_present_host_memory(cuda: FakeCuda, monkeypatch, seconds):
    """Where the update in host memory was measured."""
    monkeypatch.setattr(host_limits, "free_memory", lambda: 100 * MIB)
    known = cluster((10.0,), ["GPU"])
    measured = replace(known.devices[0], host_optimizer_seconds=seconds, host_memory_bytes=7)
    known = replace(known, devices=(measured,))
    (device,) = profiler(nn.Linear(2, 2)).with_present_memory(known).devices
    assert device.host_memory_bytes == (7 if seconds is None else 80 * MIB)


def test_given_profile_has_at_most_the_present_memory(cuda: FakeCuda, monkeypatch):
    monkeypatch.setattr(host_limits, "free_memory", lambda: 100 * MIB)
    cuda.driver, cuda.others = 200 * MIB, 100 * MIB

    def given(memory: int, held: int, on_host: int) -> tuple[int, int, int]:
        known = cluster((10.0,), ["GPU"])
        device = replace(
            known.devices[0],
            memory_bytes=memory,
            held_bytes=held,
            host_optimizer_seconds=0.1,
            host_memory_bytes=on_host,
        )
        known = replace(known, devices=(device,))
        (device,) = profiler(nn.Linear(2, 2)).within_present_memory(known).devices
        return device.memory_bytes, device.held_bytes, device.host_memory_bytes

    assert given(TOTAL, 0, TOTAL)[::2] == (900 * MIB, 80 * MIB)
    assert given(TOTAL, 320 * MIB, 7) == (900 * MIB, 320 * MIB, 7)
    assert given(500 * MIB, 10 * MIB, 7) == (500 * MIB, 10 * MIB, 7)

"""One rank of many in one process: the engine and its transport run, but no peer answers.

Messages are never sent and received memory is never written, so values are meaningless. What is
allocated, and when it is freed, is what the same rank allocates over gloo.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from poplar import Plan
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.system.trace import Trace
from poplar.zero import setup
from poplar.zero.engine import Engine
from poplar.zero.gradient_norm import fill_norm_row, norm_rows
from poplar.zero.update import ShardedUpdate

Loss = Callable[[nn.Module, Any], Tensor]


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that were allocated inside and are alive, and their peak.

    Independent of `poplar.profiler.memory`: it also follows storages that are resized.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> LiveBytes:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)
            return result

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def reset_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id_ for id_, _ in _storages((args, kwargs))}
        for key, storage in _storages(result):
            if key not in given and key not in self._sizes:
                self._set(key, storage.nbytes())
                weakref.finalize(storage, self._free, key)
        return result

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _storages(tree: Any) -> list[tuple[int, torch.UntypedStorage]]:
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [(storage._cdata, storage) for storage in storages]


class LoneControl:
    """Every rank says what this rank says. `codes` are the slots that a leader has broadcast."""

    def __init__(self, group: Any, codes: list[int]) -> None:
        self.group, self.codes = group, codes
        self._read = 0

    def max_flat_bytes(self, device: torch.device, numel: int) -> None:
        """No preference."""

    def exchange(self, values: Tensor, *, what: str) -> Callable[[], list[Tensor]]:
        return lambda: [values] * self.group.size

    def exchange_objects(self, value: Any, *, what: str) -> list[Any]:
        return [value] * self.group.size

    def broadcast_integer(self, value: int) -> None:
        self.codes.append(value)

    def flush(self) -> None:
        """Nothing is sent."""

    def receive_integer(self, source: int) -> int:
        self._read += 1
        return self.codes[self._read - 1]


def lone_communicator(group: Any) -> ProcessGroupCommunicator:
    """The transport over gloo, whose messages arrive at once and unwritten."""
    comm = ProcessGroupCommunicator(group)

    def exchange(received: Any, sent: Any, what: str, finish: Any = None, **_: Any) -> Any:
        def wait() -> float:
            if finish is not None:
                finish()
            return 0.0

        return SimpleNamespace(wait=wait)

    comm.queue.exchange = exchange
    return comm


def _broadcast_nothing(comm: Any, data: Tensor, source: int, *, what: str) -> None:
    """A mock would keep the tensors."""


class LoneRank:
    """Trains like rank `rank` of a plan; a context in which its live bytes are counted."""

    def __init__(
        self,
        new_model: Callable[[], nn.Module],
        loss: Loss,
        batch: Callable[[int], Any],
        plan: Plan,
        rank: int,
        codes: list[int],
        **options: Any,
    ) -> None:
        """`codes`: filled by the first rank of a plan, and then given to the others."""
        self.live = LiveBytes()
        self._loss, self._batch, self._plan, self._rank = loss, batch, plan, rank
        self._new_model, self._codes, self._options = new_model, codes, options

    @contextmanager
    def training(self) -> Iterator[LoneRank]:
        """After one step, with the optimizer's state."""
        group = SimpleNamespace(
            rank=self._rank,
            name=self._rank,
            size=self._plan.world_size,
            trace=Trace(),
            index=0,
            process_group=None,
            on_abort={},
            is_on_host=lambda device: True,
            supports=lambda device: False,
            default_device=torch.device("cpu"),
        )
        with self.live:
            arguments = setup.Arguments(
                model=self._new_model(),
                optimizer_class=torch.optim.AdamW,
                options={"lr": 1e-3},
                plan=self._plan,
                **{"compute_dtype": torch.float32, **self._options},
            )
            request = setup.check_request(arguments, group)
            control = LoneControl(group, self._codes)
            control._read = 0
            with mock.patch.object(ProcessGroupCommunicator, "broadcast", _broadcast_nothing):
                self.engine, self.update = setup.build_engine(
                    request, lone_communicator(group), control
                )
            self.step()
            yield self
            for hook in self.engine.changes:
                hook.remove()

    def step(self) -> None:
        """One step, as `train_step` runs it."""
        engine: Engine = self.engine
        update: ShardedUpdate = self.update
        engine.begin_step()
        own = self._plan.micro_batches[self._rank]
        for number, samples in enumerate(own):
            columns = [
                passes[number] for passes in self._plan.micro_batches if number < len(passes)
            ]
            leader = next((rank for rank, size in enumerate(columns) if size), None)
            last = number == len(own) - 1
            if engine.begin_pass(weight=0.1, leader=leader, last=last):
                if samples:
                    self._loss(engine.model, self._batch(samples)).backward()
                engine.end_pass()
        if not own and engine.begin_pass(weight=0.1, leader=0, last=True):
            engine.end_pass()
        engine.finish_gradients()
        fill_norm_row(norm_rows(engine.comm, engine.trained), engine.trained, self._rank, 2.0)
        update.step([{}] * len(update.param_groups), {flat: set() for flat in engine.trained})
        engine.strategy.all_gather_updated_parameters(engine.units)
        engine.begin_step()

    def peak(self) -> int:
        """Peak bytes of a step."""
        self.live.reset_peak()
        self.step()
        return self.live.peak


def peaks_of_ranks(
    new_model: Callable[[], nn.Module],
    loss: Loss,
    batch: Callable[[int], Any],
    plan: Plan,
    ranks: Sequence[int] | None = None,
    **options: Any,
) -> dict[int, int]:
    """By rank, the peak bytes of a step under a plan, the model's parameters included."""
    codes: list[int] = []
    found = {}
    for rank in ranks if ranks is not None else range(plan.world_size):
        lone = LoneRank(new_model, loss, batch, plan, rank, codes, **options)
        with lone.training() as trained:
            found[rank] = trained.peak()
    return found

"""Records what the modules of a model return to a loss function, and replays some rows of it.

A replayed loss needs no forward, no parameters and no other rank, so it can be computed for parts
of a micro-batch at every stage, also while parameters are sharded. A module that returns a scalar
computes a loss itself: its own code runs again, on what its submodules have returned. So does that
of other models in the loss function (a discriminator). What it writes to buffers and assigns to
frozen parameters is discarded. A loss that writes frozen parameters in place is not replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from poplar.data import pytree
from poplar.zero.engine_hooks import forwards_refused
from poplar.zero.micro_batch_loss import LossFunction, check_scalar
from poplar.zero.opaque_parameter import is_opaque, is_opaque_buffer
from poplar.zero.passes.collective_pass import in_backward

_HALF = (torch.float16, torch.bfloat16)
_PROBED = 4096
"""Elements of a row of a gradient that are compared, at least a half of them."""


class OtherCallsError(Exception):
    """A replayed loss needs more than was recorded, so it cannot be computed."""


class Call(NamedTuple):
    """One call of a module."""

    module: nn.Module
    output: Any
    """What it returned, detached; None if it computed a loss."""
    computes_loss: bool
    """The calls of its submodules follow."""


@dataclass
class RecordedLoss:
    """The loss of one micro-batch, with the calls of modules that its function has made.

    Calls inside of other ones are left out, except in modules that compute a loss.
    """

    model: nn.Module
    loss_fn: LossFunction
    batch: Any
    calls: list[Call] = field(default_factory=list)
    is_rounded: bool = False
    """Some values were computed in 16 bits."""
    is_joined: bool = False
    """Of two micro-batches: rows of outputs are known if they are the samples."""
    views_first: bool = True
    """The order of a forward with several rows per sample, such as two views: the first rows of
    all samples come first, as of `torch.cat`. Else all rows of the first sample do."""

    @property
    def samples(self) -> int:
        """Samples of the micro-batch; 0 if they cannot be counted."""
        try:
            return pytree.samples_in(self.batch)
        except ValueError:
            return 0

    def loss(self, batch: Any) -> Tensor:
        """The loss function of a batch, in a forward or a replay."""
        return check_scalar(self.loss_fn(self.model, pytree.copied(batch)))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which calls of the model and its modules are recorded."""
        with calls_by(self.model, self._record):
            yield

    def copied(self) -> RecordedLoss:
        """With outputs in memory of their own."""
        calls = [c._replace(output=pytree.map_tensors(Tensor.clone, c.output)) for c in self.calls]
        return replace(self, calls=calls)

    def join(self, other: RecordedLoss) -> RecordedLoss:
        """The loss of the samples of both, one after the other, by the function of the other.

        It raises if the calls differ, or the shapes of the outputs.
        """
        calls = []
        for one, two in zip(self.calls, other.calls, strict=True):
            if (one.module, one.computes_loss) != (two.module, two.computes_loss):
                raise OtherCallsError("other modules are called for other samples")
            calls.append(one._replace(output=_joined(one.output, two.output)))
        batch = _joined(self.batch, other.batch)
        return replace(other, batch=batch, calls=calls, is_joined=True)

    def bytes(self) -> int:
        """Memory of the outputs, in fp32."""
        return sum(4 * t.numel() for call in self.calls for t in pytree.tensors(call.output))

    def gradient(
        self, batch: Any, start: int = 0, whole: _Replay | None = None
    ) -> tuple[float, Tensor, _Replay]:
        """A loss of consecutive samples, and its gradient with respect to the outputs of modules.

        The gradient has one row per sample; of outputs with many elements, some. It raises if the
        loss cannot be computed, or does not depend on an output.

        Args:
            batch: the samples.
            start: place of the first one.
            whole: the replay of samples from 0 on, of which these are a part.
        """
        replay = _Replay(self, start, start + pytree.samples_in(batch), whole)
        with warnings.catch_warnings(), _replay_by(self.model, replay):
            warnings.simplefilter("ignore")  # warnings of few samples
            value = self.loss(batch)
            replay.check_complete()
            found = torch.autograd.grad(value, replay.leaves, allow_unused=True)
        rows = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(replay.leaves, found, strict=True)
        ]
        return float(value.detach()), torch.cat(list(map(_probe, rows)), 1), replay

    def by_sample(self, tensor: Tensor, samples: int) -> Tensor:
        """The rows of a call as `(samples, rows of a sample, ...)`."""
        if self.views_first:
            return tensor.reshape(-1, samples, *tensor.shape[1:]).transpose(0, 1)
        return tensor.reshape(samples, -1, *tensor.shape[1:])

    def as_called(self, rows: Tensor) -> Tensor:
        """The reverse of `by_sample`."""
        return (rows.transpose(0, 1) if self.views_first else rows).flatten(0, 1)

    def _record(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A graph that the user's own code compiles, or a forward that runs again in a backward.
        if torch.compiler.is_compiling() or in_backward():
            return module._call_impl(*args, **kwargs)
        place = len(self.calls)
        self.calls.append(Call(module, None, computes_loss=True))
        output = module._call_impl(*args, **kwargs)
        tensors = pytree.tensors(output)
        if not any(map(is_loss, tensors)):
            detached = pytree.map_tensors(Tensor.detach, output)
            self.calls[place:] = [Call(module, detached, computes_loss=False)]
        autocast = tensors[:1] and torch.is_autocast_enabled(tensors[0].device.type)
        self.is_rounded |= bool(autocast) or any(t.dtype in _HALF for t in tensors)
        return output


class _Replay:
    """Returns rows of what was recorded, call by call."""

    def __init__(
        self, recorded: RecordedLoss, start: int, stop: int, whole: _Replay | None
    ) -> None:
        self._recorded, self._start, self._stop, self._whole = recorded, start, stop, whole
        self._expected = iter(recorded.calls)
        self._inputs: list[list[Tensor]] = []
        """Of each call that does not compute a loss."""
        self.leaves: list[Tensor] = []
        self.state = WrittenState()
        """Of the modules whose code runs."""

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = next(self._expected, None)
        if call is None or call.module is not module:
            raise OtherCallsError("other modules are called")
        if call.computes_loss:
            self.state.copy(module)
            return module.forward(*args, **kwargs)
        self._inputs.append([t.detach() for t in pytree.tensors((args, kwargs)) if t.dim()])
        return pytree.map_tensors(self._rows, call.output)

    def check_complete(self) -> None:
        if next(self._expected, None) is not None:
            raise OtherCallsError("fewer modules are called")
        if self._whole is not None and len(self.leaves) != len(self._whole.leaves):
            raise OtherCallsError("other outputs have rows of samples")

    def _rows(self, tensor: Tensor) -> Tensor:
        """The rows of the samples in an output; all of it if it has no rows of samples."""
        recorded = self._recorded
        if not tensor.dim() or not self._has_rows(tensor):
            return tensor.clone()  # the loss may write to it, and runs again
        rows = recorded.by_sample(tensor, recorded.samples)[self._start : self._stop]
        if not rows.is_floating_point():
            return recorded.as_called(rows).clone()
        # 16 bits would round the gradients by more than what is looked for.
        leaf = (rows.float() if rows.dtype in _HALF else rows.detach()).requires_grad_()
        self.leaves.append(leaf)
        return recorded.as_called(leaf * self._factors(leaf))

    def _has_rows(self, output: Tensor) -> bool:
        """Whether an output has one row per sample, or several, as the call's input then has."""
        views, rest = divmod(len(output), self._recorded.samples)
        if rest or views < 2 or self._recorded.is_joined:
            return len(output) == self._recorded.samples
        inputs, own = self._inputs[-1], views * (self._stop - self._start)
        if all(len(one) != own for one in inputs):
            return False
        if self._whole is not None:
            self._whole.check_rows(len(self._inputs) - 1, inputs, self._start, self._stop, views)
        return True

    def check_rows(
        self, call: int, inputs: list[Tensor], start: int, stop: int, views: int
    ) -> None:
        """Raise if the inputs of a call for some samples are other rows than those of this replay.

        So the order of the rows is known, and that the call takes the samples along dim 0.
        """
        samples = self._stop - self._start
        for own, part in zip(self._inputs[call], inputs, strict=True):
            if len(own) == views * samples:
                rows = self._recorded.by_sample(own, samples)[start:stop]
                own = self._recorded.as_called(rows)
            if own.shape != part.shape or not torch.allclose(own.double(), part.double(), 1e-3):
                raise OtherCallsError("the rows of a call are in another order")

    def _factors(self, leaf: Tensor) -> Tensor:
        """Factors of the last dim, from 0.9 to 1, that are the same for all rows.

        A loss whose gradient is nothing but rounding, as that of equal student and teacher, has
        one at outputs that differ. Probabilities stay probabilities.
        """
        generator = torch.Generator("cpu").manual_seed(len(self.leaves))
        random = torch.rand(leaf.shape[-1], generator=generator, dtype=leaf.dtype, device="cpu")
        return (1.0 - 0.1 * random).to(leaf.device)


class WrittenState:
    """What forwards write: buffers in training mode, and frozen parameters, such as a teacher.

    In forwards that one rank runs alone, modules write to copies of buffers. The originals are not
    written at all, not even with their own values: the backward of the step may need them.
    Parameters are not copied, as a frozen base may have many GiB; they get back their own memory.
    """

    def __init__(self) -> None:
        self._originals: dict[nn.Module, list[tuple[str, Tensor | None]]] = {}
        self._frozen: dict[nn.Parameter, Tensor] = {}
        """By parameter, its memory."""
        self._addresses: set[int] = set()
        """Of these memories."""

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """A context in which modules that are called write to copies."""
        # Else the hook would be compiled, and modules for other sizes.
        eager = torch.compiler.set_stance("force_eager")
        hook = register_module_forward_pre_hook(self.copy)
        try:
            with warnings.catch_warnings(), eager:
                warnings.filterwarnings("ignore", "Using `torch.compile")  # of hooks that run twice
                yield
        finally:
            hook.remove()
            for module, buffers in self._originals.items():
                for name, buffer in buffers:
                    module._buffers[name] = buffer
            for parameter, data in self._frozen.items():
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
            self._originals.clear()
            self._frozen.clear()
            self._addresses.clear()

    def copy(self, called: nn.Module, _inputs: Any = None) -> None:
        """Let a module, and those inside it, write to copies until the end of the context."""
        if called in self._originals:
            return
        for module in called.modules():
            if module in self._originals:
                continue
            self._originals[module] = [*module._buffers.items()] if module.training else []
            for name, buffer in self._originals[module]:
                if buffer is not None and not is_opaque_buffer(buffer):
                    module._buffers[name] = buffer.clone()
            for parameter in module._parameters.values():
                if parameter is not None and not (parameter.requires_grad or is_opaque(parameter)):
                    self._frozen[parameter] = parameter.data
                    self._addresses.add(_address(parameter.data))

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the memory of a frozen parameter."""
        return tensor.numel() > 0 and _address(tensor) in self._addresses


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _NoTrace(TorchDispatchMode):
    """Collectives raise, as no other rank takes part, and so do writes to frozen parameters."""

    supports_higher_order_operators = True

    def __init__(self, state: WrittenState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            args, kwargs = tree_map_only(callable, self._guarded, (args, kwargs or {}))
            return func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise OtherCallsError(f"the loss calls {func}")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and any(map(self._state.has, pytree.tensors(value))):
                raise OtherCallsError(f"the loss writes a frozen parameter by {func}")
        return func(*args, **(kwargs or {}))

    def _guarded(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """A function that an operator such as `torch.cond` calls, in this mode."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return body(*args, **kwargs)

        return run


def is_loss(tensor: Tensor) -> bool:
    """Whether an output of a module may be a loss."""
    return tensor.dim() == 0 and tensor.is_floating_point()


def _probe(gradient: Tensor) -> Tensor:
    """Some elements of each row, in fp64."""
    rows = gradient.flatten(1)
    return rows[:, :: rows.shape[1] // _PROBED + 1].double()


def _joined(one: Any, two: Any) -> Any:
    """Two pytrees of tensors with the same structure, joined along dim 0."""
    others = iter(pytree.tensors(two))

    def joined(tensor: Tensor) -> Tensor:
        other = next(others)
        return torch.cat([tensor, other]) if tensor.dim() else tensor

    return pytree.map_tensors(joined, one)


@contextmanager
def alone(state: WrittenState) -> Iterator[None]:
    """A context for a loss that one rank computes alone.

    Collectives, forwards of other models with sharded parameters, and in-place writes to frozen
    parameters raise.

    Args:
        state: of the modules that are called, which write to copies.
    """
    other = OtherCallsError("another model with sharded parameters takes part in the loss")
    with state.discarded(), forwards_refused(other), _NoTrace(state):
        yield


@contextmanager
def _replay_by(model: nn.Module, replay: _Replay) -> Iterator[None]:
    with calls_by(model, replay.call), alone(replay.state), torch.enable_grad():
        yield


@contextmanager
def calls_by(model: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """A context in which `call(module, *args, **kwargs)` runs for calls of the model's modules.

    `_compiled_call_impl` replaces a module's hooks and forward, also for `nn.Module.compile`.
    """
    modules = list(model.modules())
    for module in modules:
        vars(module)["_compiled_call_impl"] = partial(call, module)
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("_compiled_call_impl", None)

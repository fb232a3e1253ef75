"""Frozen tensors that only their own module understands, as bytes: quantised weights and the like.

[Note: opaque tensors]
A frozen parameter is opaque if its dtype is not one that Poplar computes in, or if it has a class
of its own: bitsandbytes' 4-bit and 8-bit weights, torchao's tensor subclasses, integers, float8. So
are the integer buffers in which GPTQ and AWQ store weights. An opaque tensor is never cast, and is
in no flat parameter. All that is known about it is the memory that it consists of: its own, that of
the tensors inside it (`__tensor_flatten__`), and that of its attributes, such as the scales of
bitsandbytes. FSDP-QLoRA stores 4-bit weights in a float dtype so that FSDP can shard them; bytes
need no such convention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from poplar.comm.shard_layout import Layout
from poplar.system.storage import with_own_storage
from poplar.zero.absent_parameter import AbsentValues, absent_class, classes_of, direct_access
from poplar.zero.flat_parameter import PACKABLE, UnshardedBuffer, aligned_offsets

SMALL_BYTES = 1024
"""Memory up to this size stays on every rank: scalars, and tables that parameters may share."""
_LARGE_BUFFER_BYTES = 1 << 16
_QUANTISED_BUFFERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32})
_NOT_ENTERED = (nn.Module, type, FunctionType, MethodType, ModuleType, torch.dtype, torch.device)

Memory = list[Tensor]
"""Tensors that share one memory, all of which they use."""


def is_opaque(parameter: nn.Parameter) -> bool:
    """Whether a parameter, if it is frozen, is one of [Note: opaque tensors]."""
    return parameter.dtype not in PACKABLE or classes_of(parameter)[0] is not nn.Parameter


def is_opaque_buffer(buffer: Tensor) -> bool:
    """Whether a buffer is a quantised weight: large, and of an integer type below 64 bits."""
    return buffer.dtype in _QUANTISED_BUFFERS and buffer.nbytes >= _LARGE_BUFFER_BYTES


def opaque_tensors(model: nn.Module, trained: Collection[int] | None = None) -> dict[str, Tensor]:
    """The opaque parameters and buffers of a model that have values, by name.

    `trained` has the trained parameters, by `id`; default: those that require gradients.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        is_trained = parameter.requires_grad if trained is None else id(parameter) in trained
        if not is_trained and is_opaque(parameter):
            found[name] = parameter
    found.update((n, b) for n, b in model.named_buffers() if is_opaque_buffer(b))
    return {name: tensor for name, tensor in found.items() if not tensor.is_meta}


def component_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that an opaque tensor consists of, in an order that depends on its class.

    Several may share memory. Those whose bytes are not on this rank are left out.
    """
    return list(_plain_tensors(tensor, set()))


def opaque_bytes(tensor: Tensor) -> int:
    """The bytes of an opaque or plain tensor; memory that components share counts once."""
    parts = {(part.data_ptr(), part.nbytes): part.nbytes for part in component_tensors(tensor)}
    return sum(parts.values())


def _plain_tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen or isinstance(value, _NOT_ENTERED):
        return
    seen.add(id(value))
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _plain_tensors(getattr(value, name), seen)
        return
    is_here = isinstance(value, Tensor) and not isinstance(value, AbsentBytes)
    # Else it is sparse, or a wrapper of its attributes.
    if is_here and value.layout is torch.strided and value.data_ptr():
        yield value
    for attribute in list(getattr(value, "__dict__", {}).values()):
        yield from _plain_tensors(attribute, seen)


def memories_of(model: nn.Module, tensors: Sequence[Tensor]) -> list[list[Memory]]:
    """The memories of opaque tensors of a model that can be sharded, for each of them.

    Not those that are small or shared by several of them, and not views of a larger memory.
    """
    found: dict[tuple[int, int], Memory] = {}
    users: dict[tuple[int, int], set[int]] = {}
    for number, tensor in enumerate(tensors):
        for part in component_tensors(tensor):
            key = (part.untyped_storage().data_ptr(), part.untyped_storage().nbytes())
            found.setdefault(key, []).append(part)
            users.setdefault(key, set()).add(number)
    by_tensor: list[list[Memory]] = [[] for _ in tensors]
    for key, memory in found.items():
        whole = all(part.is_contiguous() and part.nbytes == key[1] for part in memory)
        if whole and key[1] > SMALL_BYTES and len(users[key]) == 1:
            by_tensor[users[key].pop()].append(memory)
    _add_tensors_of_modules(model, found)
    return by_tensor


def _add_tensors_of_modules(model: nn.Module, found: Mapping[tuple[int, int], Memory]) -> None:
    """Add tensors of the same memory that modules have taken, as bitsandbytes' 8-bit layers do."""
    for module in model.modules():
        attributes = {key: value for key, value in vars(module).items() if key[0] != "_"}
        for value in attributes.values():
            for inner in (value, *getattr(value, "__dict__", {}).values()):
                is_dense = type(inner) is Tensor and inner.layout is torch.strided
                if is_dense and not inner.is_meta:
                    storage = inner.untyped_storage()
                    memory = found.get((storage.data_ptr(), storage.nbytes()), [])
                    if memory and all(inner is not known for known in memory):
                        memory.append(inner)


_DESCRIBE = {
    *(getattr(Tensor, name).__get__ for name in ("device", "dtype", "grad", "grad_fn", "is_cpu")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_leaf", "is_meta", "itemsize")),
    *(getattr(Tensor, name).__get__ for name in ("layout", "nbytes", "ndim", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("shape", "_version")),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
    *(getattr(Tensor, name) for name in ("dim", "element_size", "is_floating_point", "numel")),
    *(getattr(Tensor, name) for name in ("requires_grad_", "size")),
}
"""What may be asked of a tensor whose bytes are not here."""


class AbsentBytes(AbsentValues):
    """A tensor that stands for an opaque one whose bytes are not on this rank: nothing reads it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DESCRIBE:
            with direct_access():
                return func(*args, **(kwargs or {}))
        if func is Tensor.detach:  # `state_dict` does; the engine removes the result from it
            return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        absent = next((each for each in args if isinstance(each, AbsentBytes)), None)
        shape = "" if absent is None else f" of shape {tuple(absent.shape)}"
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} reads a frozen tensor{shape} that is not on this "
            "rank now: at stage 3 it is sharded outside the forward of its unit. Enter `with "
            "optimizer.full_parameters():` on every rank, or use stage 2"
        )


class OpaqueBytes(UnshardedBuffer):
    """The opaque tensors of a unit in one buffer of bytes, of which each rank stores a share."""

    layout: Layout
    """How the buffer is divided, in bytes."""
    shard: Tensor
    """The bytes of this rank, where other ranks can read them."""
    dtype = torch.uint8
    is_local = False

    def __init__(
        self,
        name: str,
        named: Sequence[tuple[str, Tensor]],
        memories: Sequence[Sequence[Memory]],
        device: torch.device,
    ) -> None:
        """The opaque tensors of a unit, with the memories of each, on this rank's device."""
        self.name, self.device = name, device
        self.names = tuple(name for name, _ in named)
        self.parameters = tuple(tensor for _, tensor in named)
        """The parameters and buffers themselves."""
        self._memories = [memory for inside in memories for memory in inside]
        self._sizes = [memory[0].nbytes for memory in self._memories]
        self._offsets, self.numel = aligned_offsets(self._sizes)
        self.holders = [tensor for memory in self._memories for tensor in memory]
        """The plain tensors that use this memory."""
        # A wrapper subclass has no memory of its own, but must not be read either.
        present = {id(tensor): tensor for tensor in (*self.holders, *self.parameters)}.values()
        self._classes = [
            (tensor, type(tensor), absent_class(type(tensor), AbsentBytes)) for tensor in present
        ]
        self._placeholders = [
            torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
            for tensor in self.holders
        ]
        self._views = []
        self._versions: tuple[int, ...] | None = ()
        """Of the holders when they were attached; None while they are detached."""
        self._is_lost = False
        """A forward has replaced the data of a holder."""

    def packed_bytes(self) -> Tensor:
        """All bytes, in new memory on this rank's device."""
        packed = torch.zeros(self.numel, dtype=torch.uint8, device=self.device)
        with torch.no_grad():
            places = zip(self._memories, self._offsets, self._sizes, strict=True)
            for (tensor, *_), offset, size in places:
                data = tensor.detach().reshape(-1).view(torch.uint8)
                packed[offset : offset + size].copy_(data)
        return packed

    def divide(self, layout: Layout, shard: Tensor) -> None:
        """Set how the buffer is divided, and this rank's bytes."""
        self.layout, self.shard = layout, shard

    def allocate(self) -> None:
        """Make `values`, which have no memory yet."""
        values = torch.empty(self.numel, dtype=torch.uint8, device=self.device)
        self.use_values(values, lasting=False)
        values.untyped_storage().resize_(0)

    def use_values(self, values: Tensor, *, lasting: bool) -> None:
        views = []
        for memory, offset, size in zip(self._memories, self._offsets, self._sizes, strict=True):
            for tensor in memory:
                view = values[offset : offset + size].view(tensor.dtype).view(tensor.shape)
                views.append(with_own_storage(view) if lasting else view)
        self.values, self._views = values, views

    def attach_parameters(self) -> None:
        """Make the tensors views of `values`."""
        if self._is_lost:
            raise RuntimeError(
                f"a forward has replaced a frozen tensor of unit {self.name!r} ({self.names[0]}, "
                "...) while it was sharded; build the model and the optimizer again"
            )
        for tensor, present, _ in self._classes:
            tensor.__class__ = present
        for tensor, view in zip(self.holders, self._views, strict=True):
            tensor.data = view
        self._versions = tuple(tensor._version for tensor in self.holders)

    def detach_parameters(self) -> None:
        """Let every use of the tensors raise, until they are attached again."""
        if self._versions is None:
            return
        written = False
        if self._versions and not self.has_lasting_values:
            both = zip(self.holders, self._views, strict=True)
            self._is_lost = any(tensor.data_ptr() != view.data_ptr() for tensor, view in both)
            written = self._is_lost or self._versions != tuple(
                tensor._version for tensor in self.holders
            )
        self._versions = None
        for tensor, placeholder in zip(self.holders, self._placeholders, strict=True):
            tensor.data = placeholder
        for tensor, _, absent in self._classes:
            tensor.__class__ = absent
        if written:
            raise RuntimeError(
                f"a forward wrote to a frozen tensor of unit {self.name!r} ({self.names[0]}, ...), "
                "but at stage 3 it is sharded and the new values are lost; use stage 2. (On some "
                "CPUs bitsandbytes rewrites 4-bit weights in evaluation mode; use evaluate())"
            )

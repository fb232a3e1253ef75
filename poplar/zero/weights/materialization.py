"""Initializes a model whose parameters are on `meta`, part by part; each rank keeps its share.

A part is a unit, or a module outside units. Only one part is real at a time, on the CPU. The values
are those of a model that is built on the CPU; see [Note: order of initialization].

[Note: order of initialization]
A plain build draws random numbers as each constructor ends with `reset_parameters`, and often once
more in `model.apply(function)`. Both visit children before parents. So the same calls in the order
of `Module.apply`, from the same random state, give the same bits. With a function, all modules draw
twice before it runs: once to find the random state after the constructors, and once because the
function may depend on what the constructor has set. Numbers are drawn on the CPU, because CUDA's
generators differ between GPU models. A tied parameter keeps the values of its first module, unless
the function writes it again for a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from poplar.zero.absent_parameter import absent_data

Initializer = Callable[[nn.Module], Any]
Store = Callable[[nn.Parameter, Tensor], None]
"""Keeps this rank's part of a parameter's initial values."""
Part = list[tuple[str, nn.Module]]
"""Modules, by name, that are initialized together."""

_HOST = torch.device("cpu")
_OTHER_PART = (
    "Initialize only a module's own parameters, or name a unit that contains the modules "
    "(units=[...])"
)
_FUNCTION = "pass weights=function, where function(module) initializes the parameters of one module"
_REAL_BUFFERS = "build the model with real buffers: `with poplar.parameters_on_meta(): model = ...`"


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which models are built with their parameters on `meta` and real buffers.

    A parameter is moved when it is assigned to its module, before `reset_parameters` runs, so no
    memory is filled and no random number is drawn. Buffers, such as rotary tables, keep their
    values; `torch.device("meta")` would put them on `meta` too.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            move_to_meta([param])
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def move_to_meta(parameters: Sequence[nn.Parameter]) -> None:
    """Put parameters on `meta`; their values are lost. References to them stay valid.

    It raises, before any change, if a graph of autograd still holds one of them.
    """
    check_unused(parameters)
    for parameter in parameters:
        parameter.grad = None
        _swap(parameter, torch.empty_like(parameter, device="meta"))


def check_unused(parameters: Iterable[nn.Parameter]) -> None:
    """Check that no graph of autograd holds one of the parameters."""
    for parameter in parameters:
        if parameter._use_count() > 1:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} is still in use by a graph of "
                "autograd; delete the losses and outputs that were computed with it"
            )


def is_on_meta(model: nn.Module) -> bool:
    """Whether parameters of the model are on `meta`."""
    return any(parameter.is_meta for parameter in model.parameters())


def check_initializers(
    model: nn.Module, unit_names: Sequence[str], weights: Initializer | None
) -> None:
    """Check that a model on `meta` can be initialized, unit by unit or by the user's function.

    Raises:
        ValueError: a module has no initializer, or one whose effect is not known.
        RuntimeError: a parameter has hooks, which it would lose.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta and (
            parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        ):
            raise RuntimeError(
                f"parameter {name!r} is on meta and has hooks; register them after the optimizer "
                "has been built"
            )
    if weights is not None or _model_initializer(model) is not None:
        return
    for part in _parts(model, unit_names):
        for name, module in part:
            tensors = [*module._parameters.items(), *module._buffers.items()]
            missing = [key for key, tensor in tensors if tensor is not None and tensor.is_meta]
            initializer = _own_initializer(module)
            if missing and initializer is None:
                raise ValueError(_no_initializer(name, module, missing[0]))
            if initializer is not None and not tensors:
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) has no parameters of its own but a "
                    f"method {initializer.__name__}(), and it is not known whether its constructor "
                    f"calls it; {_FUNCTION}"
                )


@contextmanager
def real_tensors(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Make tensors on `meta` real: parameters NaN without memory on `device`, buffers on the CPU.

    At the end all buffers are on `device`. After an error everything is as before.
    """
    swapped: list[tuple[Tensor, Tensor]] = []
    buffers = [(module, dict(module._buffers)) for module in model.modules()]

    def replace(tensor: Tensor, other: Tensor) -> None:
        _swap(tensor, other)
        swapped.append((tensor, other))

    try:
        for parameter in model.parameters():
            if parameter.is_meta:
                replace(parameter, absent_data(parameter.shape, parameter.dtype, device))
        for buffer in model.buffers():
            if buffer.is_meta:
                replace(buffer, _unset(buffer))
        yield
    except BaseException:
        for module, before in buffers:
            module._buffers.update(before)
        for tensor, other in swapped:
            _swap(tensor, other)
        raise
    if swapped:
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)


class Initialization:
    """Initializes the parameters, and the buffers that were on `meta`, inside `real_tensors`."""

    def __init__(
        self, model: nn.Module, unit_names: Sequence[str], weights: Initializer | None
    ) -> None:
        """
        Args:
            unit_names: modules that are initialized as a whole.
            weights: initializes the own parameters of a module, after its constructor. None: the
                model's `_init_weights(module)` if it has one.
        """
        self.function = weights if weights is not None else _model_initializer(model)
        self.parts = list(_parts(model, unit_names))
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._absent = {id(p): (p, p.data) for p in model.parameters()}
        self._missing = dict(self._names)

    def run(self, store: Store, random_state: Tensor) -> None:
        """Initialize all parameters. Local.

        `random_state`, of the CPU's generator, is the same on all ranks. If it was this rank's, the
        state afterwards is that after a plain build; else it does not change, so that ranks with
        different states keep different ones.
        """
        before = torch.get_rng_state()
        try:
            torch.set_rng_state(random_state)
            with torch.no_grad(), _HOST:
                if self.function is None:
                    for part in self.parts:
                        with self._real(part, store):
                            _construct(part)
                else:
                    self._construct_and_apply(self.function, store)
            self._check_complete()
            if torch.equal(before, random_state):
                before = torch.get_rng_state()
        finally:
            torch.set_rng_state(before)

    def _construct_and_apply(self, function: Initializer, store: Store) -> None:
        states = []
        for part in self.parts:
            states.append(torch.get_rng_state())
            with self._real(part, None):
                _construct(part)
        for part, constructor_state in zip(self.parts, states, strict=True):
            with self._real(part, store):
                function_state = torch.get_rng_state()
                torch.set_rng_state(constructor_state)
                _construct(part)
                # Tied parameters that are stored already change only if the function sets them.
                for _, module in part:
                    for parameter in module._parameters.values():
                        if parameter is not None and id(parameter) not in self._missing:
                            parameter.data = _unset(parameter)
                torch.set_rng_state(function_state)
                for name, module in part:
                    _call(name, function, module)

    @contextmanager
    def _real(self, part: Part, store: Store | None) -> Iterator[None]:
        """The parameters of a part are real inside; at the end their values are stored."""
        own = [
            (module, key, parameter)
            for _, module in part
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        try:
            for _, _, parameter in own:
                parameter.data = _unset(parameter)
            yield
            for module, key, parameter in own:
                self._check(module, key, parameter)
                # For a tied parameter that is stored already, a constructor only draws.
                again = self.function is None and id(parameter) not in self._missing
                if store is not None and not again and _is_set(parameter):
                    store(parameter, parameter.data)
                    self._missing.pop(id(parameter), None)
        finally:
            for _, _, parameter in own:
                parameter.data = self._absent[id(parameter)][1]

    def _check(self, module: nn.Module, key: str, parameter: nn.Parameter) -> None:
        name, expected = self._names[id(parameter)], self._absent[id(parameter)][1]
        if module._parameters.get(key) is not parameter or parameter.shape != expected.shape:
            raise ValueError(
                f"the initialization of parameter {name!r} replaced it by another parameter or "
                "shape; write into it, as torch.nn.init does"
            )

    def _check_complete(self) -> None:
        if self._missing:
            raise ValueError(
                f"parameter {next(iter(self._missing.values()))!r} was not initialized completely: "
                "neither reset_parameters() of its module nor the model's _init_weights() nor "
                f"`weights` set all its elements; {_FUNCTION}"
            )
        for key, (_, absent) in self._absent.items():
            if absent.is_floating_point() and not absent.as_strided((), ()).isnan():
                raise ValueError(
                    f"parameter {self._names[key]!r} was written while another module was "
                    f"initialized. {_OTHER_PART}"
                )


def check_buffers(model: nn.Module, were_on_meta: Container[int]) -> None:
    """Check that the buffers that were on `meta` (by `id`) have got values."""
    for name, buffer in model.named_buffers():
        if id(buffer) in were_on_meta and (buffer.is_meta or not _is_set(buffer)):
            raise ValueError(
                f"buffer {name!r} is on meta, and neither a reset_parameters() nor `weights` sets "
                f"it; {_REAL_BUFFERS}"
            )


def _parts(model: nn.Module, unit_names: Sequence[str]) -> Iterator[Part]:
    """The parts of a model, in the order of `Module.apply`; each module once."""
    seen: set[int] = set()

    def modules(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for key, child in module.named_children():
            yield from modules(f"{prefix}.{key}" if prefix else key, child)
        yield prefix, module

    part: Part = []
    unit = None
    for name, module in modules("", model):
        inside = next((u for u in unit_names if _is_inside(name, u)), None)
        if part and (inside is None or inside != unit):
            yield part
            part = []
        part.append((name, module))
        unit = inside
    yield part


def _is_inside(name: str, unit: str) -> bool:
    return not unit or name == unit or name.startswith(unit + ".")


def _construct(part: Part) -> None:
    """Initialize modules as their constructors do."""
    constructed: set[nn.Parameter] = set()
    for name, module in part:
        own = {p for p in module._parameters.values() if p is not None}
        tied = {parameter: parameter.data for parameter in own & constructed}
        for parameter in tied:
            parameter.data = _unset(parameter)
        initializer = _own_initializer(module)
        if initializer is not None and (module._parameters or module._buffers):
            _call(name, initializer)
        for parameter, first in tied.items():
            parameter.data = first
        constructed |= own


def _call(name: str, initializer: Callable[..., Any], *args: Any) -> None:
    try:
        initializer(*args)
    except RuntimeError as error:
        hint = f" {_OTHER_PART}" if "single memory location" in str(error) else ""
        message = f"the initialization of module {name!r} failed: {error}{hint}"
        raise RuntimeError(message) from error


def _own_initializer(module: nn.Module) -> Callable[[], Any] | None:
    """The method that initializes a module's own parameters."""
    names = ["reset_parameters", "_reset_parameters"]  # the second: nn.MultiheadAttention
    if _model_initializer(module) is None:  # else init_weights() initializes the modules inside too
        names.append("init_weights")
    methods = (getattr(module, name, None) for name in names)
    return next((method for method in methods if callable(method)), None)


def _model_initializer(model: nn.Module) -> Initializer | None:
    """The function for one module that Hugging Face models, and others, pass to `apply`."""
    function = getattr(model, "_init_weights", None)
    return function if callable(function) else None


def _no_initializer(name: str, module: nn.Module, key: str) -> str:
    kind, remedy = "buffer", _REAL_BUFFERS
    if key in module._parameters:
        kind, remedy = "parameter", f"{_FUNCTION}, or weights=path of a safetensors file"
    return (
        f"module {name!r} ({type(module).__name__}) has {kind} {key!r} on meta and no "
        f"reset_parameters(); {remedy}"
    )


def _unset(tensor: Tensor) -> Tensor:
    """A tensor on the CPU in which `_is_set` finds no values."""
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device=_HOST)


def _is_set(tensor: Tensor) -> bool:
    """Whether all elements have been written (integers: any)."""
    if tensor.is_floating_point():
        # The sum needs no memory; it may also be NaN because infinities cancel.
        return not bool(tensor.sum().isnan()) or not bool(tensor.isnan().any())
    return tensor._version > 0


def _swap(tensor: Tensor, data: Tensor) -> None:
    """Exchange the data, the device and the version of two tensors.

    As `torch.utils.swap_tensors`, but the Python attributes stay and weak references, which
    compiled modules hold, are allowed.
    """
    data.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, data)
    # The dictionaries of hooks stay, but only this makes autograd call those of the new data:
    # otherwise hooks that are registered later would be ignored, too.
    tensor._backward_hooks = tensor._backward_hooks
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks

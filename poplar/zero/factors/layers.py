"""Which layers may be factored: plain `nn.Linear` modules whose weight nothing else reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn
from torch.nn.parameter import UninitializedParameter

from poplar.values.formatting import format_names


def factored_layers(
    model: nn.Module, names: Sequence[str], trained: Collection[int]
) -> dict[str, nn.Linear]:
    """The modules of `Plan.factored`, by name, if all may be factored; `trained` is by `id`.

    It raises if a module does not exist, if its weight gradient is not the plain product of its
    rows, or if something else reads or changes the weight.
    """
    modules = dict(model.named_modules())
    layers: dict[str, nn.Linear] = {}
    for name in names:
        module = modules.get(name)
        problem = _problem(modules, module, trained)
        if problem is not None:
            raise ValueError(
                f"Plan.factored: {name!r} {problem}. Only plain nn.Linear layers whose weight is "
                "trained and used nowhere else can be factored; leave it out of Plan.factored"
            )
        assert isinstance(module, nn.Linear)
        layers[name] = module
    return layers


def factorable_layers(model: nn.Module, trained: Collection[int]) -> dict[str, nn.Linear]:
    """All modules that `factored_layers` accepts, by name."""
    modules = dict(model.named_modules())
    names = [name for name, each in modules.items() if _problem(modules, each, trained) is None]
    return factored_layers(model, names, trained)


def _problem(
    modules: Mapping[str, nn.Module], module: nn.Module | None, trained: Collection[int]
) -> str | None:
    """Why a module cannot be factored; None if it can."""
    if module is None:
        linear = [name for name, other in modules.items() if type(other) is nn.Linear]
        return f"is not a module of the model, whose nn.Linear modules are: {format_names(linear)}"
    if type(module) is not nn.Linear:
        return f"is a {type(module).__name__}, not a plain nn.Linear"
    weight = module._parameters.get("weight")
    if weight is None or isinstance(weight, UninitializedParameter):
        return "has no parameter 'weight' of its own (is it weight-normed or pruned?)"
    if "forward" in vars(module):
        return "has a forward of its own, which replaces that of nn.Linear"
    if id(weight) not in trained:
        return "has a frozen weight, or one that is in no param group"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "has hooks on the gradient of its weight, which no rank computes as a whole"
    holders = [
        f"{name}.{own}"
        for name, other in modules.items()
        for own, parameter in other._parameters.items()
        if parameter is weight and other is not module
    ]
    return f"shares its weight with {format_names(holders)}" if holders else None

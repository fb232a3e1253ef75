"""Compiled models stay compiled while they are profiled, and afterwards.

A counting backend shows how many graphs were compiled, and whether passes ran them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from poplar.profiler import compilation
from poplar.profiler.batch_sizes import SizeLimits, climb
from poplar.profiler.compilation import (
    HookedGraphs,
    compiled_code_preserved,
    frames_compiled,
    is_compiled,
)
from poplar.profiler.passes import Passes
from poplar.zero.checks.loss_mean import FirstLossCheck

BLOCKS = 3
WAYS = ("torch.compile(model)", "model.compile()", "compiled blocks")
CLIMBED = [1, 2, 4, 8, 16, 32]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Counting:
    """A backend that counts the graphs that it compiles, and how often any of them runs."""

    def __init__(self, name: str) -> None:
        self._inner = lookup_backend(name)
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        compiled = self._inner(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


def compiled(way: str, backend: Counting, **options: Any) -> nn.Module:
    model = Stack()
    if way == "torch.compile(model)":
        whole: nn.Module = torch.compile(model, backend=backend, **options)
        return whole
    for module in [model] if way == "model.compile()" else model.blocks:
        module.compile(backend=backend, **options)
    return model


def passes_of(model: nn.Module) -> Passes:
    return Passes(
        model, lambda model, batch: model(batch).sum(), torch.randn(4, 8), torch.device("cpu")
    )


def climbed(passes: Passes, max_batch: int = 32) -> list[int]:
    plenty = float("inf")
    limits = SizeLimits(max_batch=max_batch, activation_bytes=plenty, longest_seconds=plenty)
    *_, points = climb(passes, limits)
    return [point.batch for point in points]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("way", "name"), [*((way, "eager") for way in WAYS), ("model.compile()", "aot_eager")]
)
def test_every_timed_pass_runs_compiled_graphs(way, name):
    backend = Counting(name)
    passes = passes_of(compiled(way, backend))
    with compiled_code_preserved():
        assert climbed(passes) == CLIMBED
        functions = 2 if way == "compiled blocks" else 1  # the first input needs no gradient
        assert backend.graphs <= 3 * functions
        graphs, runs = backend.graphs, backend.runs
        for size in CLIMBED:
            passes.seconds(size)
        each = BLOCKS if way == "compiled blocks" else 1
        assert backend.runs - runs == each * len(CLIMBED)
        assert backend.graphs == graphs


@pytest.mark.parametrize("way", WAYS)
def test_model_is_compiled_again_in_training_without_the_graphs_of_the_profile(way):
    backend = Counting("eager")
    model = compiled(way, backend)
    with compiled_code_preserved():
        climbed(passes_of(model))
    graphs, runs = backend.graphs, backend.runs
    for _ in range(2):
        model(torch.randn(5, 8)).sum().backward()
    each = BLOCKS if way == "compiled blocks" else 1
    assert backend.runs - runs == 2 * each
    assert 1 <= backend.graphs - graphs <= 2


def test_model_with_one_graph_per_size_is_not_run_eagerly_after_the_limit_of_torch():
    backend = Counting("eager")
    passes = passes_of(compiled("model.compile()", backend, dynamic=False))
    sizes = range(1, torch._dynamo.config.recompile_limit + 5)
    limit = torch._dynamo.config.recompile_limit
    with compiled_code_preserved():
        for size in sizes:
            passes.seconds(size)
            passes.seconds(size)
    assert backend.graphs == len(sizes)
    assert backend.runs == 2 * len(sizes)
    assert torch._dynamo.config.recompile_limit == limit
    assert not torch._dynamo.config.fail_on_recompile_limit_hit


def test_model_that_compiles_in_every_pass_raises(monkeypatch: pytest.MonkeyPatch):
    most = torch._dynamo.config.recompile_limit + 1
    monkeypatch.setattr(compilation, "MOST_GRAPHS", most)
    passes = passes_of(compiled("model.compile()", Counting("eager"), dynamic=False))

    @compiled_code_preserved()
    def run_all_sizes() -> None:
        for size in range(1, most + 3):
            passes.run(size)

    with pytest.raises(RuntimeError, match=f"needs more than {most} graphs.*dynamic=True"):
        run_all_sizes()


def test_other_compiled_functions_stay_cached_without_compilation():
    backend = Counting("eager")
    function = torch.compile(lambda x: x + 1, backend=backend)
    function(torch.ones(3))
    with compiled_code_preserved():
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    function(torch.ones(3))
    assert backend.graphs == 1


def test_graphs_broken_by_hooks_are_forgotten_before_passes_without_hooks():
    backend, graphs = Counting("eager"), HookedGraphs()
    model = compiled("model.compile()", backend)
    runs: Counter[str] = Counter()

    def run(kind: str, hooked: bool) -> None:
        before = backend.runs
        with graphs.run(hooked=hooked):
            model(torch.randn(4, 8)).sum().backward()
        runs[kind] = backend.runs - before

    run("plain", hooked=False)
    hooks = []
    for block in model.get_submodule("blocks").children():
        weight, values = block.linear.weight, block.linear.weight.data

        def unshard(*_: Any, weight: nn.Parameter = weight, values: Tensor = values) -> None:
            weight.data = values

        hooks.append(block.register_forward_pre_hook(torch.compiler.disable(unshard)))
        weight.data = torch.empty(0)
    run("with hooks", hooked=True)
    for hook in hooks:
        hook.remove()
    run("plain again", hooked=False)
    assert runs["plain"] == runs["plain again"] == 1
    assert runs["with hooks"] == BLOCKS


def test_compiled_modules_are_recognized():
    backend = Counting("eager")
    assert not is_compiled(Stack())
    assert is_compiled(compiled("torch.compile(model)", backend))
    assert is_compiled(compiled("model.compile()", backend))
    blocks = compiled("compiled blocks", backend)
    assert [is_compiled(block) for block in blocks.get_submodule("blocks")] == [True] * BLOCKS


def test_compiled_frames_are_counted():
    before = frames_compiled()
    compiled("model.compile()", Counting("eager"))(torch.ones(2, 8))
    assert frames_compiled() > before


def test_the_check_of_the_first_loss_does_not_break_one_graph():
    """The user's code compiles calls of the model, whose modules the check records."""
    model = Stack()
    graph = torch.compile(model, backend="eager", fullgraph=True)
    loss_fn = FirstLossCheck(looks=True).watched(lambda _model, batch: graph(batch).mean())
    batch = torch.ones(4, 8)
    for _ in range(2):
        assert torch.equal(loss_fn(model, batch), model(batch).mean())

"""Keeps compiled models compiled while they are measured, and their caches as they were.

What `torch.compile` does silently would make a profile wrong: it runs a function eagerly for good
after its eighth graph, or once it has been called under a dispatch mode. Batch sizes are not marked
as dynamic: as in training, torch makes the batch dimension dynamic at the second size, so that a
compiled function has at most three graphs per kind of hooks (one sample, the first size, any
size). With `dynamic=False` it has one graph per size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

MOST_GRAPHS = 64
"""Graphs of one function while it is measured. torch's own limit of 8 is too low for a model that
is compiled with `dynamic=False` and runs with every batch size of a curve."""


def frames_compiled() -> int:
    """How many functions `torch.compile` has tried to compile in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return int(torch._dynamo.utils.counters["frames"]["total"])


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` made it, or `module.compile()` was called."""
    return (
        hasattr(module, "_torchdynamo_orig_callable")
        or getattr(module, "_compiled_call_impl", None) is not None
    )


@contextmanager
def eagerly() -> Iterator[None]:
    """Compiled functions run eagerly inside, and are still compiled afterwards."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def compiled_code_preserved() -> Iterator[None]:
    """Never fall back to eager inside; forget the graphs that were compiled inside.

    So the first batch size of training is compiled as without a profile, and graphs of the profile
    do not count towards torch's limit. All compiled functions of the process are compiled again at
    their next call, mostly from torch's cache on disk.

    Raises:
        RuntimeError: a function needs more than `MOST_GRAPHS` graphs.
    """
    import torch._dynamo

    before, config = frames_compiled(), torch._dynamo.config
    limits = {
        "recompile_limit": max(MOST_GRAPHS, config.recompile_limit),
        "accumulated_recompile_limit": max(64 * MOST_GRAPHS, config.accumulated_recompile_limit),
        "fail_on_recompile_limit_hit": not config.suppress_errors,  # torch refuses both together
    }
    try:
        with config.patch(limits):
            yield
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise RuntimeError(
            f"a compiled function of the model needs more than {limits['recompile_limit']} graphs, "
            "so torch would run it eagerly from then on, in training too; find out what changes "
            'from call to call with TORCH_LOGS="recompiles", or compile with dynamic=True'
        ) from error
    finally:
        if frames_compiled() != before:
            torch.compiler.reset()


class HookedGraphs:
    """Forgets graphs that were broken by the hooks of a run before a run without such hooks.

    A hook that communicates splits the graph of the function around it, and torch does not try
    that function as a whole again when the hook is gone.
    """

    def __init__(self) -> None:
        self._has_broken_graphs = False

    @contextmanager
    def run(self, *, hooked: bool) -> Iterator[None]:
        """Run in a context; `hooked`: modules of the model have hooks in their forward."""
        if self._has_broken_graphs and not hooked:
            torch.compiler.reset()
            self._has_broken_graphs = False
        before = frames_compiled()
        try:
            yield
        finally:
            self._has_broken_graphs |= hooked and frames_compiled() != before

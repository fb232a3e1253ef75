"""Parameters are restored after measurements, whether or not the engine writes them in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from poplar.zero.preserved_state import host_copies, model_preserved, parameters_preserved


def overwrite(model: nn.Module) -> None:
    """As the engine: it replaces trained values, and writes frozen ones in place."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.zeros_like(parameter, dtype=torch.bfloat16)
        else:
            parameter.fill_(7.0)


@pytest.mark.parametrize("on_host", [False, True])
def test_trained_and_frozen_parameters_get_their_values_back(on_host: bool) -> None:
    model = nn.Linear(4, 2)
    model.bias.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    copies = host_copies(model) if on_host else None
    for _ in range(2):
        with parameters_preserved(model, copies):
            overwrite(model)
        torch.testing.assert_close([p.data for p in model.parameters()], before, rtol=0, atol=0)


def test_values_that_were_not_copied_keep_their_memory() -> None:
    model = nn.Linear(4, 2)
    model.bias.requires_grad_(False)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with parameters_preserved(model):
        overwrite(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


class Movable(Tensor):
    """A tensor in host memory that says that it is on a GPU if its memory is one of `MOVED`."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda" if self.data_ptr() in MOVED else "cpu")


MOVED: set[int] = set()


def test_buffers_that_were_moved_are_back_in_their_memory() -> None:
    model, there = nn.Linear(4, 2), torch.zeros(3).as_subclass(Movable)
    MOVED.add(there.data_ptr())
    model.register_buffer("table", torch.arange(3.0).as_subclass(Movable))
    place = model.table.data_ptr()
    with model_preserved(model, torch.device("cpu")):
        model.table.data = there  # as the engine
        assert model.table.device.type == "cuda"
    assert model.table.device.type == "cpu"
    assert model.table.data_ptr() == place
    assert model.table.tolist() == [0.0, 1.0, 2.0]


def with_grid() -> nn.Module:
    """A model with a buffer whose elements share memory."""
    model = nn.Linear(4, 2)
    model.register_buffer("grid", torch.meshgrid(torch.arange(3.0), torch.arange(2.0))[0])
    assert 0 in model.grid.stride()
    return model


def test_buffers_whose_elements_share_memory_are_kept() -> None:
    model = with_grid()
    place = model.grid.data_ptr()
    with model_preserved(model, torch.device("cpu")):
        model.eval()
        model.grid = model.grid + 1
    assert model.training
    assert (model.grid.data_ptr(), model.grid.stride()) == (place, (1, 0))
    assert model.grid.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_buffers_whose_elements_share_memory_get_their_values_back() -> None:
    model = with_grid()
    with model_preserved(model, torch.device("cpu")):
        model.grid[:, 0].fill_(7.0)  # which changes all columns
    assert model.grid.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_buffers_that_have_not_changed_are_not_written(value: float) -> None:
    """Their memory may be a read-only file."""
    model = nn.Linear(4, 2)
    model.register_buffer("table", torch.full((3,), value))
    version = model.table._version
    with model_preserved(model, torch.device("cpu")):
        model(torch.ones(1, 4))
    assert model.table._version == version


def test_modes_and_gradients_are_back_also_if_a_buffer_cannot_be_written() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("table", torch.ones(3))
    model.bias.grad = gradient = torch.ones(2)
    preserved = model_preserved(model, torch.device("cpu"))
    preserved.__enter__()
    model.eval()
    model.table.data = torch.ones(5)
    with pytest.raises(RuntimeError, match="size"):
        preserved.__exit__(None, None, None)
    assert model.training
    assert model.bias.grad is gradient

"""Parameters that cannot be laid out in flat parameters: each error says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from poplar.zero.checks.model_checks import (
    check_parameters,
    reject_embeddings_by_micro_batch,
    reject_scripted,
    reject_sparse_buffers,
    reject_sparse_embeddings,
)
from poplar.zero.opaque_parameter import memories_of


def inference() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Linear(2, 2).weight


MADE: dict[str, tuple[Callable[[], nn.Parameter], str]] = {
    "inference": (inference, "outside of it"),
    "sparse": (lambda: nn.Parameter(torch.eye(2).to_sparse()), "to_dense"),
    "expanded": (lambda: nn.Parameter(torch.ones(1).expand(4)), "clone"),
    "integers": (lambda: nn.Parameter(torch.ones(2).int(), requires_grad=False), "must be float32"),
    "float8": (lambda: nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn)), "such as LoRA"),
    "float64": (lambda: nn.Parameter(torch.ones(2).double()), r"Call model\.float\(\)"),
    "complex64": (lambda: nn.Parameter(torch.ones(2).cfloat()), "torch.view_as_real"),
    "complex128": (lambda: nn.Parameter(torch.ones(2).cdouble()), "compute_dtype=torch.float32"),
}


@pytest.mark.parametrize("name", MADE)
def test_error_says_what_to_do(name: str) -> None:
    make, says = MADE[name]
    parameter = make()
    with pytest.raises((TypeError, ValueError), match=says):
        check_parameters([("weight", parameter)], {id(parameter)})


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_buffers_are_refused_by_name(
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("adjacency", convert(torch.eye(2)))
    with pytest.raises(TypeError, match=r"'0\.adjacency' .*plain attribute"):
        reject_sparse_buffers(model)
    del model[0].adjacency
    model[0].adjacency = convert(torch.eye(2))
    reject_sparse_buffers(model)
    assert memories_of(model, []) == []


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_where_there_are_gradients(cls: type[nn.Module]) -> None:
    model = nn.Sequential(cls(4, 2, sparse=True))
    with pytest.raises(TypeError, match=r"'0' has sparse gradients"):
        reject_sparse_embeddings(model)
    reject_sparse_embeddings(model.requires_grad_(False))


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_is_refused_where_weights_are_trained(cls: type[nn.Module]) -> None:
    model = nn.Sequential(cls(4, 2, max_norm=1.5, norm_type=1.0))
    with pytest.raises(ValueError, match=r"'0' has max_norm=1\.5.*renorm\(weight, 1\.0, 0, 1\.5\)"):
        reject_embeddings_by_micro_batch(model.eval(), allowed=True)
    reject_embeddings_by_micro_batch(model.requires_grad_(False), allowed=False)


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_by_counts_of_a_micro_batch_must_be_allowed(cls: type[nn.Module]) -> None:
    model = nn.Sequential(cls(4, 2, scale_grad_by_freq=True))
    with pytest.raises(ValueError, match="'0' has scale_grad_by_freq=True"):
        reject_embeddings_by_micro_batch(model, allowed=False)
    reject_embeddings_by_micro_batch(model, allowed=True)
    reject_embeddings_by_micro_batch(model.requires_grad_(False), allowed=False)


def test_modules_of_torchscript_are_refused_by_name() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"the model is a .*before torch\.jit\.script\(\)"):
        reject_scripted(scripted)
    traced = torch.jit.trace(nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(traced))
    with pytest.raises(TypeError, match=r"module '1\.0' is a .*such as in a list"):
        reject_scripted(model)


def test_weights_that_are_computed_are_not_read() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Embedding(4, 2)))
    before = [buffer.clone() for buffer in model.buffers()]
    reject_sparse_embeddings(model)
    reject_embeddings_by_micro_batch(model, allowed=False)
    assert all(map(torch.equal, before, model.buffers()))

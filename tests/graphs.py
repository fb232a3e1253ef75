"""A stand-in for graphs of another library: batches are objects of a class of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 4


@dataclass
class Graph:
    """A sample of a dataset."""

    x: Tensor
    """Features of each node."""
    edges: Tensor
    """`[2, edges]`: from which node to which."""
    y: Tensor


class Graphs:
    """Several graphs as one. As in PyTorch Geometric, `to` changes the object itself."""

    def __init__(self, **tensors: Tensor) -> None:
        self.__dict__.update(tensors)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graphs:
        for name, tensor in vars(self).items():
            setattr(self, name, tensor.to(device, non_blocking=non_blocking))
        return self

    def pin_memory(self) -> Graphs:
        self.x = self.x.clone()
        return self


def dataset(samples: int, nodes: int = 6, seed: int = 0) -> list[Graph]:
    """Graphs of about so many nodes."""
    generator = torch.Generator().manual_seed(seed)

    def graph(nodes: int) -> Graph:
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        x = torch.randn(nodes, FEATURES, generator=generator)
        return Graph(x, edges, x.mean().reshape(1))

    return [graph(nodes + place % 3) for place in range(samples)]


def as_dict(samples: list[Graph]) -> dict[str, Tensor]:
    sizes = torch.tensor([len(sample.x) for sample in samples])
    starts = sizes.cumsum(0) - sizes
    return {
        "x": torch.cat([sample.x for sample in samples]),
        "edges": torch.cat([s.edges + at for s, at in zip(samples, starts, strict=True)], 1),
        "of": torch.arange(len(samples)).repeat_interleave(sizes),
        "y": torch.cat([sample.y for sample in samples]),
    }


def as_object(samples: list[Graph]) -> Graphs:
    return Graphs(**as_dict(samples))


class Attributes(dict[str, Any]):
    """A dict whose values are attributes, too."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def as_attributes(samples: list[Graph]) -> Attributes:
    return Attributes(as_dict(samples))


class Network(nn.Module):
    """One round of messages. Writes to its batch, so that it cannot run twice on the same one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.messages, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 1)

    def forward(self, graphs: Any) -> Tensor:
        graphs.x = self.messages(graphs.x)
        sent = graphs.x.index_add(0, graphs.edges[1], graphs.x[graphs.edges[0]]).relu()
        pooled = sent.new_zeros(len(graphs.y), 8).index_add(0, graphs.of, sent)
        return self.head(pooled).squeeze(1)


def mean_over_graphs(model: nn.Module, graphs: Any) -> Tensor:
    return (model(graphs) - graphs.y).square().mean()

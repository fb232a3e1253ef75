"""The order in which messages are handed to gloo."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from poplar.comm import point_to_point
from poplar.comm.point_to_point import Message


@pytest.mark.parametrize("seed", range(5))
def test_receives_are_posted_before_sends(seed: int) -> None:
    """Else both directions of a link take turns: the peer sends when it knows of the receive."""
    draw = random.Random(seed)
    tensors = [torch.full((1,), float(number)) for number in range(6)]
    messages = [Message(peer, data, draw.random() < 0.5) for peer, data in enumerate(tensors)]
    posted: list[tuple[Any, int]] = []

    def batch(operations: list[tuple[Any, int]]) -> list[int]:
        posted.extend(operations)
        return [int(tensors[peer]) for _, peer in operations]

    def operation(op: Any, tensor: Any, *, group: Any, group_peer: int, tag: int) -> Any:
        assert tensor is tensors[group_peer]
        return op, group_peer

    with (
        mock.patch.object(dist, "P2POp", operation),
        mock.patch.object(dist, "batch_isend_irecv", batch),
    ):
        works = point_to_point._start(mock.Mock(), messages, tag=1)
    received = [message.incoming for message in messages].count(True)
    assert [op for op, _ in posted] == [dist.irecv] * received + [dist.isend] * (6 - received)
    assert sorted(works) == [(peer, (peer,)) for peer in range(6)]  # each work has its own peer

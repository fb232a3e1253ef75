"""The order in which messages are handed to gloo."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch

from poplar.comm import point_to_point
from poplar.comm.point_to_point import Message


@pytest.mark.parametrize("seed", range(5))
def test_receives_are_posted_before_sends(seed: int) -> None:
    """Else both directions of a link take turns: the peer sends when it knows of the receive."""
    draw = random.Random(seed)
    tensors = [torch.full((1,), float(number)) for number in range(6)]
    messages = [Message(peer, data, draw.random() < 0.5) for peer, data in enumerate(tensors)]
    process_group = mock.Mock(spec=["recv", "send"])
    process_group.recv.side_effect = process_group.send.side_effect = lambda own, peer, tag: peer
    works = point_to_point._start(process_group, messages, lambda _: 1)
    calls = process_group.mock_calls
    received = [message.incoming for message in messages].count(True)
    assert [call[0] for call in calls] == ["recv"] * received + ["send"] * (6 - received)
    for _, ((tensor,), peer, tag), _ in calls:
        assert tensor is tensors[peer]
        assert tag == 1
    assert sorted(works) == [(peer, peer) for peer in range(6)]  # each work has its own peer

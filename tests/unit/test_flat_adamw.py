"""AdamW on flat shards: what its operator must not be given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from poplar.zero.optimizers.flat_adamw import FlatAdamW


def test_a_step_count_below_zero_is_refused() -> None:
    """Its bias correction would divide by 0, and all parameters would be NaN."""
    values = nn.Parameter(torch.ones(64))
    optimizer = FlatAdamW([values])
    values.grad = torch.ones(64)
    optimizer.step()
    optimizer.state[values]["step"].fill_(-1)
    before = values.detach().clone()
    with pytest.raises(ValueError, match="is -1, below 0"):
        optimizer.step()
    assert torch.equal(values, before)

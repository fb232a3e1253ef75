"""Checkpoints in memory: the same bits, also for other shares and with state in host memory."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from poplar.elastic import MemoryCheckpoints
from two_ranks.rank import RANKS, Rank
from two_ranks.training import SHARES, STAGES, Training


def elastic(own: Rank) -> None:
    """Save the first step, train on, and load it into other optimizers."""
    for stage in STAGES:
        for spares in range(RANKS):
            began = time.monotonic()
            # With a spare shard, each rank is a host of its own, with its own folder.
            name = f"{own.folder.name}-{stage}-{own.rank if spares else 0}"
            folder = Path("/dev/shm", f"poplar-{name}")
            settings: dict[str, Any] = {"folder": folder, "spare_shards": spares}
            training = Training(own, stage)
            memory = MemoryCheckpoints(training.optimizer, **settings)
            training.step()
            memory.save(1)
            expected = training.finish()
            if spares and own.rank:
                shutil.rmtree(folder)  # as if this host was lost
            cases = [(SHARES[0], (0.5, 1.0)), (SHARES[1], ())]
            loaded, is_equal = [], True
            for shares, host_state in cases:
                training = Training(own, stage, shares, host_state=host_state)
                memory = MemoryCheckpoints(training.optimizer, **settings)
                loaded.append(memory.load_latest())
                found = training.finish()
                is_equal &= all(torch.equal(found[name], value) for name, value in expected.items())
            memory.remove()
            dist.barrier()
            shutil.rmtree(folder, ignore_errors=True)
            if own.rank == 0:
                own.note(
                    "elastic",
                    f"stage {stage}, {spares} spare shards",
                    is_equal and loaded == [1, 1],
                    f"loaded the steps {loaded}",
                    seconds=time.monotonic() - began,
                )

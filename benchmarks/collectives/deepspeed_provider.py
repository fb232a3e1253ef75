"""DeepSpeed's shared-memory all-reduce for CPU ranks of one host."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.case import Case
from collectives.provider import Prepared, Provider


def why_absent() -> str:
    """Why it is not available; empty if it is."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed (make peers)"
    return ""


class DeepSpeedShm(Provider):
    """`inference_all_reduce_`, compiled at its first use. The constructor is collective."""

    name = "DeepSpeed shared memory"
    transport = "shared_memory"

    def __init__(self, rank: int, ranks: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_SIZE"] = str(ranks)
        # Its segments are named after the job's address.
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", str(20_000 + os.getppid() % 20_000))
        with contextlib.redirect_stdout(io.StringIO()):  # it prints while it compiles
            from deepspeed.ops.op_builder import ShareMemCommBuilder

            for turn in (0, 1):  # rank 0 compiles, then the others load the result
                if (rank == 0) == (turn == 0):
                    operators = ShareMemCommBuilder().load(verbose=False)
                dist.barrier()
        operators.initialize(ranks, rank)
        self._level = operators.vector_kernel_level()

    def prepare(self, case: Case, mine: Tensor) -> Prepared | None:
        # Its kernels crash on processors without the required instructions.
        needed = 1 if case.dtype == "fp32" else 2
        if case.operation != "all_reduce" or self._level < needed:
            return None
        whole = mine.clone()
        operator = torch.ops.deepspeed.inference_all_reduce_
        return Prepared(lambda: operator(whole), lambda: whole)

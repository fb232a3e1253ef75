"""MPI through mpi4py, if it and `mpirun` are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from collectives.case import Case
from collectives.provider import Prepared, Provider

if TYPE_CHECKING:
    from mpi4py import MPI


def why_absent() -> str:
    """Why MPI is not available; empty if it is."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py; needs MPI and its headers)"
    if shutil.which("mpirun") is None:
        return "there is no mpirun (on Debian: apt install openmpi-bin)"
    return ""


def why_apart(ranks: int) -> str:
    """Why MPI cannot be used by these processes; empty if it can."""
    if absent := why_absent():
        return absent
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    return "" if size == ranks else f"mpirun did not start these {ranks} ranks (MPI knows {size})"


def command(ranks: int) -> list[str]:
    """The command that starts this many ranks on this host, more than cores if needed."""
    start = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
    return [*start, "--allow-run-as-root"] if os.geteuid() == 0 else start


class Mpi(Provider):
    """MPI's collectives, with counts per rank for uneven shares."""

    transport = "mpi"

    def __init__(self, rank: int) -> None:
        from mpi4py import MPI

        self.name = " ".join(MPI.Get_library_version().split(",")[0].split()[:3]).removesuffix(" v")
        self._world: MPI.Intracomm = MPI.COMM_WORLD
        self._rank = rank

    def prepare(self, case: Case, mine: Tensor) -> Prepared | None:
        if case.dtype != "fp32":
            return None
        counts = [case.layout.size(rank) for rank in range(case.ranks)]
        world, send = self._world, mine.numpy()
        if case.operation == "all_reduce":
            whole = torch.empty_like(mine)
            target = whole.numpy()
            return Prepared(lambda: world.Allreduce(send, target), lambda: whole)
        if case.operation == "reduce_scatter":
            out = torch.empty(counts[self._rank])
            own = out.numpy()
            if case.is_even:
                return Prepared(lambda: world.Reduce_scatter_block(send, own), lambda: out)
            return Prepared(lambda: world.Reduce_scatter(send, own, counts), lambda: out)
        gathered = torch.empty(case.layout.numel)
        target = gathered.numpy()
        if case.is_even:
            return Prepared(lambda: world.Allgather(send, target), lambda: gathered)
        return Prepared(lambda: world.Allgatherv(send, (target, counts)), lambda: gathered)

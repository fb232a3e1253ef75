"""Sums and gathers of random cases computed by MPI, under mpirun, for `test_mpi_oracle`.

mpirun -n 4 python mpi_sums.py seed times folder
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI
from test_random_collectives import WORLD, Case

seed, times, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
world = MPI.COMM_WORLD
assert world.Get_size() == WORLD
rank, draw, results = world.Get_rank(), random.Random(seed), {}
for number in range(times):
    case = Case.draw(number, draw)
    counts = list(case.layout.sizes)
    if case.operation == "reduce_scatter":
        out = np.empty(counts[rank], np.float32)
        world.Reduce_scatter(case.packed(rank).float().numpy(), out, counts, MPI.SUM)
    elif case.operation == "all_gather":
        mine = case.values(rank)[slice(*case.layout.bounds(rank))].to(case.dtype).float().numpy()
        out = np.empty(case.layout.numel, np.float32)
        world.Allgatherv(mine, [out, counts])
    else:
        continue
    results[str(number)] = out
np.savez(folder / f"{rank}.npz", **results)

"""Collectives over unequal shards: who takes part, what is sent, and the transports that carry it.

Knows layouts and tensors, not what they mean: no unit, no stage, no model is ever named here.
Importing it makes `torch.distributed.init_process_group("cpu:poplar")` known: see `backend.py`.
"""

from poplar.comm import backend
from poplar.comm.algorithms import ALL_GATHERS, REDUCE_SCATTERS
from poplar.comm.bucket import Bucket, Codec
from poplar.comm.choice import connect, control_of
from poplar.comm.communicator import Communicator, Pending
from poplar.comm.control import Control
from poplar.comm.group import Group

__all__ = [
    "ALL_GATHERS",
    "REDUCE_SCATTERS",
    "Bucket",
    "Codec",
    "Communicator",
    "Control",
    "Group",
    "Pending",
    "connect",
    "control_of",
]

backend.register()

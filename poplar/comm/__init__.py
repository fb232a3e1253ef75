"""Collectives over unequal shards: who takes part, what is sent, and the transports that carry it.

Knows layouts and tensors, not what they mean: no unit, no stage, no model is ever named here.
Importing it makes `torch.distributed.init_process_group("cpu:poplar")` known (`torch_backend.py`).
"""

from poplar.comm import torch_backend
from poplar.comm.algorithms import ALL_GATHERS, REDUCE_SCATTERS
from poplar.comm.bucket import Bucket, Codec
from poplar.comm.communicator import Communicator, Pending
from poplar.comm.control_channel import Control
from poplar.comm.group import Group
from poplar.comm.transport_selection import connect, control_of

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

torch_backend.register()

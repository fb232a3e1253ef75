"""Collectives over shards of unequal size: process groups, buckets, and the transports.

This package knows tensors and shard layouts only; it never refers to units, stages or models.
"""

from poplar.comm.bucket import Bucket, Codec, Encoded
from poplar.comm.communicator import Communicator, Work
from poplar.comm.control_channel import Control
from poplar.comm.group import Group
from poplar.comm.transport_selection import connect, connect_control

__all__ = [
    "Bucket",
    "Codec",
    "Communicator",
    "Control",
    "Encoded",
    "Group",
    "Work",
    "connect",
    "connect_control",
]

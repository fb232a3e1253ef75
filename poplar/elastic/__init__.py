"""Training goes on from memory when ranks are lost or join."""

from poplar.elastic.memory_checkpoints import MemoryCheckpoints

__all__ = ["MemoryCheckpoints"]

"""What people use today."""

from __future__ import annotations

PEERS = {
    "DDP": ("ddp", 0),
    "FSDP2": ("fsdp2", 3),
    "FSDP2, kept gathered": ("fsdp2", 2),
    "DeepSpeed ZeRO-0": ("deepspeed", 0),
    "DeepSpeed ZeRO-1": ("deepspeed", 1),
    "DeepSpeed ZeRO-2": ("deepspeed", 2),
    "DeepSpeed ZeRO-3": ("deepspeed", 3),
}
"""Provider and the ZeRO stage that each of them is, by name."""

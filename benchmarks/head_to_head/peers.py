"""The engines that Poplar is compared with."""

from __future__ import annotations

PEERS = {
    "DDP": ("ddp", 0),
    "FSDP2": ("fsdp2", 3),
    "FSDP2, reshard_after_forward=False": ("fsdp2", 2),
    "DeepSpeed ZeRO-0": ("deepspeed", 0),
    "DeepSpeed ZeRO-1": ("deepspeed", 1),
    "DeepSpeed ZeRO-2": ("deepspeed", 2),
    "DeepSpeed ZeRO-3": ("deepspeed", 3),
}
"""Provider and ZeRO stage of each engine in its usual form (even batches), by name."""
COMPRESSING = ("int8", "int4")
"""Not policies of `poplar.search`: Poplar's plan "exact" with compressed communication."""
COMPRESSED_PEERS = {
    "DDP, bf16 gradients": ("ddp_bf16", 0),
    "DDP, PowerSGD of rank 4": ("ddp_powersgd", 0),
}
"""DDP with the communication hooks of torch, where links are slow. Their gradients are not exact,
so they do not count as peers in thresholds either."""
COMPRESSED = "compressed"
"""Their policy."""
UNEVEN_PEERS = {
    "DDP, uneven batches": ("ddp", 0),
    "FSDP2, uneven batches": ("fsdp2", 3),
    "FSDP2, reshard_after_forward=False, uneven batches": ("fsdp2", 2),
}
"""The same with micro-batches in proportion to measured speeds and a weighted loss, set
manually. They do not count as peers in ratios and thresholds. DeepSpeed's configuration has one
micro-batch size."""

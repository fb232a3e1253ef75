"""Triton kernels of the operators, for GPUs where the C++ operators were not built.

One operator per file, kernel and launcher. Arithmetic is fp32, and every product and every sum is
rounded before it is used again (no contraction), so the bits are those of `poplar.ops.plain`.
Launchers expect what `poplar.ops` documents, on the current device; call them through it.
"""

from .adamw import adamw_
from .clip import clip_coefficient, exact_norm
from .codec import decode_sum_, encode_
from .exact_sum import exact_sum_
from .norm import block_sums_of_squares
from .pack import pack_
from .rank_sum import rank_sum_

__all__ = [
    "adamw_",
    "block_sums_of_squares",
    "clip_coefficient",
    "decode_sum_",
    "encode_",
    "exact_norm",
    "exact_sum_",
    "pack_",
    "rank_sum_",
]

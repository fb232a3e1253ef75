"""Which CUDA devices a binary has kernels for."""

from __future__ import annotations

from collections.abc import Iterable

Capability = tuple[int, int]
"""A compute capability, such as (8, 6)."""


def has_kernels(capability: Capability, architectures: Iterable[str]) -> bool:
    """Whether a build with these architectures, such as "sm_86" and "compute_90", has kernels.

    Binary code (sm) runs on later minor versions of its major version, PTX (compute) on all later
    versions. With the suffix "a", either runs on that version only; with "f", on its major version.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        if kind not in ("sm", "compute") or not digits.isdigit():
            continue
        built_for = divmod(int(digits), 10)
        if number.endswith("a"):
            runs = built_for == capability
        elif kind == "sm" or number.endswith("f"):
            runs = built_for[0] == capability[0] and built_for[1] <= capability[1]
        else:
            runs = built_for <= capability
        if runs:
            return True
    return False

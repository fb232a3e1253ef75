"""Which build of torch has kernels for a GPU, as of torch 2.14.

docs/guides/pytorch-builds.md has the table of builds and its sources.
"""

from __future__ import annotations

from collections.abc import Collection

from poplar.system.cuda_architectures import Capability

_TURING, _BLACKWELL = (7, 5), (10, 0)
_VOLTA = (7, 0)


def build_for(capability: Capability, of_job: Collection[Capability]) -> str:
    """Which build of torch to install for a GPU.

    Args:
        of_job: capabilities of all GPUs of the job. Its ranks should have one build of torch.
    """
    if min(of_job) < _TURING and max(of_job) >= _BLACKWELL:
        if min(of_job) < _VOLTA:
            return (
                "no published build has kernels for both Blackwell and GPUs before Volta; leave "
                "one of them out, or build torch with CUDA 12.8 for both"
            )
        return "install the cu128 build of torch 2.10, the last one for both Volta and Blackwell"
    if capability < _TURING:
        return (
            "builds of torch for CUDA 13 have no kernels for GPUs before Turing, such as the V100; "
            "install the cu126 build of the same torch version on all hosts"
        )
    if capability >= _BLACKWELL:
        return "install a build of torch for CUDA 12.8 or later on all hosts"
    return "install a build of torch for another CUDA version"

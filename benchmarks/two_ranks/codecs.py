"""Compressed communication at every stage: small errors, and the same bits for all shares."""

from __future__ import annotations

import time

import torch
from llama import next_byte_loss
from torch import Tensor

import poplar
from two_ranks.rank import Rank
from two_ranks.training import SHARES, STAGES, Training

MOST_ERROR = {"int8": 0.02, "int4": 0.3}
"""Of the mean gradient, over the norm of the exact one."""


def codecs(own: Rank) -> None:
    """Gradients beside exact ones; parameters for two shares, and after a checkpoint."""
    for stage in STAGES:
        exact = train(own, stage, SHARES[0], "exact")[0]
        for precision, most in MOST_ERROR.items():
            began = time.monotonic()
            runs = [train(own, stage, shares, precision) for shares in SHARES]
            errors = [float((one - exact).norm() / exact.norm()) for one, _ in runs]
            found = [parameters for _, parameters in runs]
            found.append(resume(own, stage, precision))
            is_equal = all(
                torch.equal(other[name], value)
                for other in found
                for name, value in found[0].items()
            )
            if own.rank == 0:
                own.note(
                    "codecs",
                    f"stage {stage}, {precision}",
                    is_equal and min(errors) > 0.0 and max(errors) < most,
                    "" if is_equal else "other shares or a checkpoint gave other parameters",
                    gradient_error=max(errors),
                    seconds=time.monotonic() - began,
                )


def train(
    own: Rank, stage: int, shares: tuple[float, ...], precision: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of the first step, and the parameters after all steps; saves the first one."""
    training = Training(own, stage, shares, communication=precision)
    optimizer = training.optimizer
    for micro_batch in optimizer.micro_batches(training.batch):
        next_byte_loss(training.model, micro_batch).backward()
    parts = [gradient.flatten().cpu() for gradient in optimizer.full_gradients().values()]
    optimizer.step()
    if shares is SHARES[0]:
        poplar.save_checkpoint(own.folder / f"codecs-{stage}-{precision}", optimizer)
    return torch.cat(parts), training.finish()


def resume(own: Rank, stage: int, precision: str) -> dict[str, Tensor]:
    """The parameters after the steps that follow the saved one, with other shares."""
    training = Training(own, stage, SHARES[1], communication=precision)
    poplar.load_checkpoint(own.folder / f"codecs-{stage}-{precision}", training.optimizer)
    return training.finish()

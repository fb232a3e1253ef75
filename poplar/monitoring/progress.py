"""`Progress`: the steps since the last report, as values."""

from __future__ import annotations

from dataclasses import dataclass

from poplar.values.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Some consecutive steps; the same on every rank."""

    step: int
    """Trained so far."""
    losses: tuple[float, ...]
    """Of the global batches, step by step."""
    grad_norm: float | None
    """Before clipping, in the last step; None if it was not computed."""
    samples: int
    """In these steps."""
    step_seconds: tuple[float, ...]
    """Of the slowest rank, step by step, without the time between steps."""
    wall_seconds: float
    """From the last report to this one, with loading and all that the loop does."""
    waiting_seconds: tuple[float, ...]
    """By rank, the mean per step of the time in which it waited for other ranks."""
    skipped: int
    """Steps that were not applied, because a loss or the gradient was not finite."""
    sum_of_speeds: float | None
    """Samples per second of all devices, each alone at its best batch; None without a profile."""
    plan: Plan | None

    @property
    def samples_per_second(self) -> float:
        """In the steps."""
        return self.samples / sum(self.step_seconds)

    @property
    def of_sum_of_speeds(self) -> float | None:
        """`samples_per_second` as a fraction of the sum of speeds."""
        if self.sum_of_speeds is None:
            return None
        return self.samples_per_second / self.sum_of_speeds

    def scalars(self) -> dict[str, float]:
        """What a chart shows, by name."""
        mean_step = sum(self.step_seconds) / len(self.step_seconds)
        values = {
            "loss": self.losses[-1],
            "grad_norm": self.grad_norm,
            "samples_per_second": self.samples_per_second,
            "samples_per_second_with_loading": self.samples / self.wall_seconds,
            "percent_of_sum_of_speeds": None
            if self.of_sum_of_speeds is None
            else 100.0 * self.of_sum_of_speeds,
            "step_seconds": mean_step,
            "skipped_steps": float(self.skipped),
        }
        waiting = {
            f"waiting_percent/rank_{rank}": 100.0 * seconds / mean_step
            for rank, seconds in enumerate(self.waiting_seconds)
        }
        return {name: v for name, v in {**values, **waiting}.items() if v is not None}

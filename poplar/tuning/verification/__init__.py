"""Verifies a plan on a user's model: one step under the plan, compared with one process."""

from poplar.tuning.verification.outcome import ParameterError, Verification
from poplar.tuning.verification.step import verify

__all__ = ["ParameterError", "Verification", "verify"]

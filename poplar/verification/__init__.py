"""Verifies a plan on a user's model: one step under the plan, compared with one process."""

from poplar.verification.outcome import ParameterError, Verification
from poplar.verification.step import verify

__all__ = ["ParameterError", "Verification", "verify"]

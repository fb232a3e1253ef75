"""Is a plan exact on *your* model? One step under the plan, held against one process."""

from poplar.verification.outcome import ParameterError, Verification
from poplar.verification.step import verify

__all__ = ["ParameterError", "Verification", "verify"]

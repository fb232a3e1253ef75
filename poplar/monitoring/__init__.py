"""Progress of training to files, TensorBoard and Weights & Biases, and reports of recorded runs.

`Monitor` passes the progress of any training loop to loggers. A `RunRecord` is the value that
`RunFile` writes; `write_report` makes one HTML file of it. Records and reports need neither torch
nor the machine of the run, so `Monitor` is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poplar.monitoring.loggers import JsonLines, Logger, Progress, RunFile, TensorBoard, WandB
from poplar.monitoring.record import Run, RunRecord
from poplar.monitoring.report import write_report
from poplar.system.trace import Span

if TYPE_CHECKING:
    from poplar.monitoring.monitor import Monitor

__all__ = [
    "JsonLines",
    "Logger",
    "Monitor",
    "Progress",
    "Run",
    "RunFile",
    "RunRecord",
    "Span",
    "TensorBoard",
    "WandB",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name != "Monitor":
        raise AttributeError(f"module 'poplar.monitoring' has no attribute {name!r}")
    from poplar.monitoring.monitor import Monitor

    return Monitor

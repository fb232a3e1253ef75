"""Callbacks for any training loop: progress to a file, TensorBoard, Weights & Biases, a report."""

from poplar.callbacks.loggers import JsonLines, TensorBoard, WandB
from poplar.callbacks.monitor import Logger, Monitor
from poplar.callbacks.progress import Progress
from poplar.callbacks.run_file import RunFile

__all__ = ["JsonLines", "Logger", "Monitor", "Progress", "RunFile", "TensorBoard", "WandB"]

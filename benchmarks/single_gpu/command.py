"""Options and start of the commands `gpu_step.py` and `gpu_unequal.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rows import new_parser


def gpu_parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options that both commands have."""
    parser = new_parser(description, rounds=rounds)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep output and stacks here")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser


def require_device(kind: str) -> None:
    """Exit with a message if the device is a GPU and there is none."""
    if kind == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here: `python -m poplar doctor` says more")

"""Options and start of the commands `gpu_step.py` and `gpu_unequal.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console


def new_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that both commands have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the rows as JSON lines")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep output and stacks here")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show rows of an earlier run")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser


def new_console() -> Console:
    """A console whose tables are whole where stdout is a file."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def require_device(kind: str) -> None:
    """Exit with a message if the device is a GPU and there is none."""
    if kind == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here: `python -m poplar doctor` says more")

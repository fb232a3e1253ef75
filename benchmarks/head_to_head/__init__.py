"""The parts of `train.py`: training engines compared on the same unequal ranks."""

import sys
from pathlib import Path

# Models, data and the measurement of speeds are those of the examples.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

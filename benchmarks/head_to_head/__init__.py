"""Training engines held against each other on the same unequal ranks: the parts of `train.py`."""

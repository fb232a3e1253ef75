"""The rooms of `benchmarks/kernels.py`: lists of tensors, what is done with them, rows, tables."""

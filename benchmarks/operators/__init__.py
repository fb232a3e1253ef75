"""The parts of `kernels.py`: tensor lists, tasks, timing, rows and tables."""

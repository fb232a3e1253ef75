"""The parts of `allreduce.py`: cases, providers, timing, rows and tables."""

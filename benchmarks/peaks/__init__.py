"""The parts of `memory.py`: the models, and the measurement on each rank."""

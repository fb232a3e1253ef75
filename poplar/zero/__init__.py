"""ZeRO for unequal ranks: units of parameters, the agreed schedule, one strategy per stage.

Talks to a `Communicator` and never asks which one; knows plans only as shares and passes.
"""

"""ZeRO for unequal ranks: units of parameters, an agreed collective order, a strategy per stage.

The engine uses a `Communicator` and does not depend on its transport. From a plan it uses only the
shares and passes.
"""

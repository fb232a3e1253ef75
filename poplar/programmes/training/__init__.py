"""`poplar.distribute`: from a model for one device to planned training on all ranks."""

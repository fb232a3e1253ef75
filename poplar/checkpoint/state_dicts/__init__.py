"""State dicts of sharded state, as torch's own functions expect them."""

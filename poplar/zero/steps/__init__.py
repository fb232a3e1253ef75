"""One optimizer step: its phases, state, settings, result, and what may go wrong in it."""

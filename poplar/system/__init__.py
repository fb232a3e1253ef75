"""What this host and its devices report about themselves, and the trace of a step."""

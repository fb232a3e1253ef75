"""Training goes on from memory when ranks are lost or join."""

"""Where the values of a new engine come from, without holding a whole model."""

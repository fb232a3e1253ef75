"""The optimizer classes of the user: what each needs, and what its state consists of."""

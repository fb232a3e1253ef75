"""A model's forward pass as values: operators, shapes, placements of tensors on ranks."""

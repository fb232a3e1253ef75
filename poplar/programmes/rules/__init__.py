"""How operators can be divided over ranks: one rule per kind of operator, without torch.

A rule says which dimensions of an operator's tensors go together (`Pattern`). What follows from it
is the same for all operators: in which placements its tensors can be, and each rank's own call.
"""

"""Weight gradients of `nn.Linear` that travel as factors (`Plan.factored`).

The gradient of a weight is the sum over rows of `dy[i]` times `x[i]`. Where rows are few, it takes
fewer bytes to send the rows to the owners, which multiply them, than to reduce the gradient.
"""

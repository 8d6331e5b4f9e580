"""One inner step: loss, gradient, inner optimizer and learning rate schedule; and the held-out loss."""

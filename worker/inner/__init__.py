"""One inner step: loss, gradient, inner optimizer and its schedule; and the held-out loss."""

"""Models, as run specs describe them."""

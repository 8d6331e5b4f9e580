"""A script's own training loop: checks of what it passes in, hooks on its optimizers, and its DataLoader."""

"""A run: its state in memory and the one way to change it, when its rounds open and close, and its work units."""

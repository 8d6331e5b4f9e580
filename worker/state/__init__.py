"""What a worker holds: the model's fragments, the outer state, work that is in no mean yet, and the snapshot of it."""

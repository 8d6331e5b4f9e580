"""How a worker obtains the run's state: by seeding it, from a checkpoint, or from its own state plus deltas."""

"""One run in memory, and the one way to change it: its members, its open round, and the pure `decide`."""

"""Differential privacy of what leaves a worker: clipping, noise, and the count of what has left."""

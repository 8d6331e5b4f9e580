"""Differential privacy of what a worker sends: clipping, noise, and the count of contributions."""

"""A script's own training loop: how it gets into a run, and what is checked of it before."""

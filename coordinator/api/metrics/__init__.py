"""The metrics that Prometheus scrapes: families.py declares them, runs.py and server.py collect them."""

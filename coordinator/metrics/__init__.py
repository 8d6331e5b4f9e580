"""What Prometheus scrapes: of each run and its workers, and of the server."""

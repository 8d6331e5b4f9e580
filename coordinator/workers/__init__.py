"""The requests of workers: joining, leases, assignments, and reports of what a round has cost them."""

"""What workers ask for and report: joining, leases, assignments, and what a round has cost them."""

"""The way to the coordinator: requests, retries, the lease, and how the run's outer state is fetched or seeded."""

"""The worker as a member of a run: the REST client, joining and leaving, the lease and its heartbeat."""

"""Everything that outlives the process: blobs, the data directory, the database and its tables, tokens, and the lease
of the leader."""

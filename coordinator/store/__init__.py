"""What outlives the process: the store of blobs, the data directory, the database and its tables, tokens."""

"""What outlives the process: files and how they become durable, the database and its tables, tokens."""

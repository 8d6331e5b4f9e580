"""What lasts: files and how they become durable, the database and its tables, tokens."""

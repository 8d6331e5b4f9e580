"""Where text comes from, in tasks that any process can read by itself: text files, JSON lines, parquet, the hub."""

"""What only makes the coordinator faster: payloads in memory, and freed memory that is kept."""

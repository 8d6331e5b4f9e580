"""What only makes things faster: host memory that is used again, a side stream on a GPU, zstd where it pays."""

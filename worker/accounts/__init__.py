"""What a worker tells of itself: the seconds of each stage, the bytes moved, losses and speed."""

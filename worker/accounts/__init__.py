"""What a worker reports about itself: the seconds of each stage, bytes moved, losses and speed."""

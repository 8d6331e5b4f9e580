"""Work on the bytes of one fragment: the mean of its contributions, and its outer state."""

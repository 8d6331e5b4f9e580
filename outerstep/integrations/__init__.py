"""DiLoCo in the training loops of others."""

"""What brings a run back after a restart, a corrupt file, a full disk or a restored backup."""

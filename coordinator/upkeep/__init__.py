"""What keeps a run going that something has happened to: a restart, a spoilt or full disk, a restored backup."""

"""Code that coordinator, worker and CLI share, and that is not part of the protocol."""

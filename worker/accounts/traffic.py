"""The payload bytes that a worker moves."""

import threading


class Traffic:
    """Counts the payload bytes moved since the worker started, repeated attempts included. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.upload_bytes = 0
        self.download_bytes = 0

    def add(self, *, up: int = 0, down: int = 0) -> None:
        with self._lock:
            self.upload_bytes += up
            self.download_bytes += down

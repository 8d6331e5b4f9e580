"""Whether this process can reach the store of its blobs. A store that hangs raises no error for minutes, so what counts
is how long a question has had no answer."""

import threading
from collections.abc import Callable

PROBE_S = 1.0
STORE_S = 3.0  # without an answer of the store, until it counts as out of reach


class StoreProbe:
    """Reads something from the store again and again. `ask` reads it, and may take long to fail. `clock`: monotonic."""

    def __init__(self, ask: Callable[[], object], clock: Callable[[], float]) -> None:
        self._ask, self._clock = ask, clock
        self.asked_at: float | None = None  # the first question since the last answer
        self._error = ""
        self.answer_s: float | None = None  # the time of the last answer; None if the last attempt failed

    @property
    def silent_s(self) -> float:
        """Seconds since the first question that has no answer; 0 if the last one was answered."""
        return 0.0 if (asked_at := self.asked_at) is None else self._clock() - asked_at

    @property
    def fault(self) -> str:
        """Why the store cannot be used; empty if it can."""
        return self.why if self.silent_s > STORE_S else ""

    @property
    def why(self) -> str:
        """Why that question has no answer."""
        return self._error or f"no answer for {self.silent_s:.0f} s"

    def run(self) -> None:
        """Ask once."""
        began = self._clock()
        if self.asked_at is None:
            self.asked_at = began
        try:
            self._ask()
            self.asked_at, self._error = None, ""
            self.answer_s = self._clock() - began
        except Exception as error:  # noqa: BLE001 - whatever it is, the store cannot be used
            self._error, self.answer_s = str(error), None

    def start(self, stopping: threading.Event) -> None:
        """Ask every PROBE_S until `stopping` is set, on a thread that may hang in a request: nobody waits for it."""

        def ask_again() -> None:
            while not stopping.wait(PROBE_S):
                self.run()

        threading.Thread(target=ask_again, name="store probe", daemon=True).start()

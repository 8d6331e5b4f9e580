"""Signals as a terminal's shell leaves them, however the tests were started."""

import signal


def default_signals() -> None:
    """Take every signal as by default; a child's `preexec_fn`. Those that were ignored before would stay so in it."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)

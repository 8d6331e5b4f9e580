"""Upload bodies go over the line one after the other."""

import threading

import pytest

from worker.line import Line


def test_the_next_body_follows_the_last_piece_without_waiting_for_the_answer() -> None:
    line = Line()
    with line.taken(iter([b"a", b"b"])) as first:
        assert list(first) == [b"a", b"b"]
        with line.taken(iter([b"c"])) as second:  # the first one's answer is still to come
            assert list(second) == [b"c"]


def test_nobody_else_sends_meanwhile() -> None:
    line, taken = Line(), threading.Event()
    sent: list[bytes] = []

    def send() -> None:
        with line.taken(iter([b"other"])) as body:
            taken.set()
            sent.extend(body)

    with line.taken(iter([b"a", b"b"])) as body:
        sent.append(next(body))
        other = threading.Thread(target=send)
        other.start()
        assert not taken.wait(0.05)
        sent.extend(body)
        other.join()
    assert sent == [b"a", b"b", b"other"]


def test_an_upload_that_breaks_frees_the_line() -> None:
    line = Line()

    def break_off() -> None:
        with line.taken(iter([b"a", b"b"])) as body:
            next(body)
            raise OSError("connection reset")

    with pytest.raises(OSError, match="reset"):
        break_off()
    with line.taken(iter([b"c"])) as body:
        assert list(body) == [b"c"]

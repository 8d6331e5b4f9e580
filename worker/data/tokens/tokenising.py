"""Tokenise tasks in several processes. The results come in the order of the tasks.

Processes rather than threads: the threads of tokenizers share one interpreter, which has to convert every id to a numpy
number serially. A process gets whole tasks and sends back only the ids.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from worker.data.sources.documents import Task
from worker.data.tokens.encoding import Encoder, Encoding, TokenisedText
from worker.errors import DataError

TaskTokens = tuple[TokenisedText, TokenisedText]  # the text of a task to train on, and its held-out text


def tokenised(
    tasks: Iterable[Task], encoding: Encoding, processes: int
) -> Generator[tuple[int, TaskTokens], None, None]:
    """Yield the size of each task and its result, in order. Raises DataError for the first task that fails."""
    if processes == 1:
        encode = encoding.encoder()
        for task in tasks:
            yield task.size, _parts(encode, task)
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(encoding,)
    )
    try:
        pending: deque[tuple[int, Future[TaskTokens]]] = deque()
        for task in tasks:
            pending.append((task.size, pool.submit(_tokenise_here, task)))
            if len(pending) > 2 * processes:  # keeps every process busy, and few results in memory
                size, result = pending.popleft()
                yield size, result.result()
        for size, result in pending:
            yield size, result.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenising process was killed, possibly because memory ran out; run the same command again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _parts(encode: Encoder, task: Task) -> TaskTokens:
    pieces = list(task.pieces())
    training, held_out = (encode([each for each in pieces if each.held_out == part]) for part in (False, True))
    return training, held_out


# --- in a tokenising process --------------------------------------------------------------------------------------

_here: Encoder


def _begin(encoding: Encoding) -> None:
    global _here
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that collects the results
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _here = encoding.encoder()


def _end_with_parent() -> None:
    """End this process when its parent ends. A parent that was killed cannot end it, and it would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenise_here(task: Task) -> TaskTokens:
    return _parts(_here, task)

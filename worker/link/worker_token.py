"""The worker token that a worker gets for a join token. Many boxes share the join token; from then on this worker uses
its own.

The worker draws the secret itself and saves it before it asks. So if the answer is lost, even by kill -9, it repeats
the same exchange. A worker token that the coordinator rejects was revoked, and is not exchanged again.
"""

import logging
import secrets
from dataclasses import replace
from pathlib import Path

from outerstep.common.connections import error_text
from protocol.errors import Problem
from protocol.messages import JOIN_PREFIX, ExchangeRequest
from worker.errors import BoxError
from worker.link.client import Client
from worker.ranks import Ranks
from worker.state.state_dir import WORKER_TOKEN, StateDir, WorkerToken

log = logging.getLogger(__name__)


def with_worker_token(client: Client, worker: str, directory: Path | str | None, ranks: Ranks) -> Client:
    """Return the client with the worker token of `worker`. A join token is exchanged unless that happened before; any
    other token stays. All ranks call this, and the first one asks.

    Raises Problem if the coordinator refuses, StateDirBusy, and BoxError if the directory cannot keep the token.
    """
    if not client.has_join_token:
        return client
    if directory is None:
        raise BoxError(
            "a join token is exchanged for a worker token that has to be kept: give a state_dir, or a worker token"
        )
    return client.with_token(ranks.on_first(lambda: _worker_token(client, worker, directory)))


def token_to_read_with(token: str, run: str, worker: str, directory: Path | str) -> str:
    """Return the worker token if `token` is a join token that was exchanged before, else `token`."""
    if not token.startswith(JOIN_PREFIX):
        return token
    try:
        own = _saved(StateDir(directory), run, worker)
    except (OSError, BoxError):
        return token  # reported by the code that writes there
    return token if own is None or not own.exchanged else own.token


def _worker_token(client: Client, worker: str, directory: Path | str) -> str:
    try:
        with StateDir(directory, pause=client.pause) as files:
            own = _saved(files, client.run, worker)
            if own is not None and own.exchanged:
                _check_still_good(client.with_token(own.token), files)
                return own.token
            own = own or WorkerToken(client.run, worker, f"ost_{secrets.token_urlsafe(32)}", exchanged=False)
            files.save_worker_token(own)
            info = client.exchange_token(worker, ExchangeRequest(token=own.token))
            files.save_worker_token(replace(own, exchanged=True))
    except OSError as error:
        raise BoxError(
            f"{directory} cannot keep this worker's token: {error_text(error)}; give another --state-dir"
        ) from error
    log.info(
        "exchanged the join token for this worker's own token, %s, kept in %s", info.id, Path(directory, WORKER_TOKEN)
    )
    return own.token


def _saved(files: StateDir, run: str, worker: str) -> WorkerToken | None:
    try:
        own = files.worker_token()
    except ValueError as error:
        raise BoxError(
            f"{files.path / WORKER_TOKEN} is damaged ({error}); delete it to exchange the join token again"
        ) from error
    return own if own is not None and (own.run, own.worker) == (run, worker) else None


def _check_still_good(client: Client, files: StateDir) -> None:
    """Raise Problem `unauthorized` with a remedy if the coordinator does not accept the token any more."""
    try:
        client.run_detail()
    except Problem as problem:
        if problem.slug != "unauthorized":
            raise
        raise Problem(
            "unauthorized",
            f"this worker's own token, in {files.path / WORKER_TOKEN}, was revoked or belongs to another "
            "coordinator; if the operator lets this worker join again, delete the file, and the join token is "
            "exchanged again",
        ) from problem

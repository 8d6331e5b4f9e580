"""A worker's own token: what it has got for a join token, which many boxes share, and uses from then on.

It draws the secret itself and saves it before it asks, so an exchange whose answer was lost, also by kill -9, is asked
for again and is the same one. A token that the coordinator refuses is never exchanged anew: it was revoked.
"""

import logging
import secrets
from dataclasses import replace
from pathlib import Path

from protocol.errors import Problem
from protocol.messages import JOIN_PREFIX, ExchangeRequest
from worker.errors import BoxError
from worker.link.client import Client
from worker.ranks import Ranks
from worker.state.state_dir import OWN_TOKEN, OwnToken, StateDir

log = logging.getLogger(__name__)


def with_own_token(client: Client, worker: str, directory: Path | None, ranks: Ranks) -> Client:
    """Return the client with the own token of `worker`, where it has a join token; that is exchanged unless it was
    before. All ranks call this, and the first one asks.

    Raises Problem where the coordinator refuses, StateDirBusy, and BoxError for a directory that cannot keep the token.
    """
    if not client.has_join_token:
        return client
    if directory is None:
        raise BoxError("a join token is exchanged for one that has to be kept: give a state_dir, or a worker token")
    return client.holding(ranks.by_first(lambda: _own_token(client, worker, directory)))


def token_to_read_with(token: str, run: str, worker: str, directory: Path) -> str:
    """Return the worker's own token if `token` is a join token that was exchanged before; otherwise `token`."""
    if not token.startswith(JOIN_PREFIX):
        return token
    try:
        own = _saved(StateDir(directory), run, worker)
    except (OSError, BoxError):
        return token  # whoever is to write there will tell
    return token if own is None or not own.exchanged else own.token


def _own_token(client: Client, worker: str, directory: Path) -> str:
    try:
        with StateDir(directory) as files:
            own = _saved(files, client.run, worker)
            if own is not None and own.exchanged:
                _check_still_good(client.holding(own.token), files)
                return own.token
            own = own or OwnToken(client.run, worker, f"ost_{secrets.token_urlsafe(32)}", exchanged=False)
            files.save_own_token(own)
            info = client.exchange(worker, ExchangeRequest(token=own.token))
            files.save_own_token(replace(own, exchanged=True))
    except OSError as error:
        raise BoxError(
            f"{directory} cannot keep this worker's token: {error.strerror}; give another --state"
        ) from error
    log.info("the join token was exchanged for this worker's own token, %s, kept in %s", info.id, directory / OWN_TOKEN)
    return own.token


def _saved(files: StateDir, run: str, worker: str) -> OwnToken | None:
    try:
        own = files.own_token()
    except ValueError as error:
        raise BoxError(
            f"{files.path / OWN_TOKEN} is damaged ({error}); remove it to exchange the join token"
        ) from error
    return own if own is not None and (own.run, own.worker) == (run, worker) else None


def _check_still_good(client: Client, files: StateDir) -> None:
    """Raise Problem `unauthorized` that says what to do, where the coordinator does not know the token any more."""
    try:
        client.run_detail()
    except Problem as problem:
        if problem.slug != "unauthorized":
            raise
        raise Problem(
            "unauthorized",
            f"this worker's own token, in {files.path / OWN_TOKEN}, was revoked, or is another coordinator's; where "
            "the operator lets this worker join again, remove the file, and the join token is exchanged anew",
        ) from problem

"""Bearer tokens, by the hash of their secrets in memory, so that a request costs no query.

Secrets are random; only their SHA-256 is stored, by which they are found.
"""

import hashlib
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.store import audit
from coordinator.store.database import Database
from coordinator.store.identity import Actor, Identity
from coordinator.store.tables import TokenRow
from outerstep.common.files import fsync
from protocol.errors import Problem
from protocol.messages import DEFAULT_NAMES, DEFAULT_USES, JOIN_PREFIX, NewToken, Scope, TokenInfo, TokenRequest

TOKEN_PREFIX = "ost_"
LAST_USES_S = 60.0  # between two writings of when tokens were used last


def new_secret(prefix: str = TOKEN_PREFIX) -> tuple[str, bytes]:
    """Return a new bearer token and the hash under which it is stored."""
    secret = prefix + secrets.token_urlsafe(32)
    return secret, secret_hash(secret)


def secret_hash(secret: str) -> bytes:
    """Return the SHA-256 of a bearer token."""
    return hashlib.sha256(secret.encode()).digest()


@dataclass(frozen=True)
class _Held:
    identity: Identity
    expires_at: float | None

    @property
    def is_lasting_admin(self) -> bool:
        return self.identity.allows(Scope.ADMIN) and self.expires_at is None


class Tokens:
    """All tokens but those of members. `now`: seconds since 1970. Every change of one is an entry of the audit."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database, self._now = database, now
        self._changing = threading.Lock()
        self._used: dict[str, float] = {}  # since the last writing
        self._write_at = now() + LAST_USES_S
        self._by_hash: dict[bytes, _Held] = {}
        self._lineages: dict[str, str] = {}  # by id, of those that have not expired
        with database.read() as session:
            self._hold([_held(row) for row in session.scalars(select(TokenRow))])

    def _hold(self, held: list[_Held]) -> None:
        self._by_hash = {each.identity.secret_hash: each for each in held}
        self._lineages = self._good()

    def _good(self) -> dict[str, str]:
        now, held = self._now(), self._by_hash.values()
        good = [each.identity for each in held if each.expires_at is None or each.expires_at > now]
        return {str(each.token): str(each.lineage) for each in good}

    def _held_but(self, token_id: str) -> list[_Held]:
        return [each for each in self._by_hash.values() if each.identity.token != token_id]

    # --- what is asked of every request ---------------------------------------------------------------------------

    def find(self, hashed: bytes) -> Identity | None:
        """Return the holder of the token with this hash; None if there is none, or it has expired."""
        held = self._by_hash.get(hashed)
        if held is None or (held.expires_at is not None and held.expires_at <= self._now()):
            return None
        return held.identity

    def note_use(self, identity: Identity) -> None:
        """Remember that the token is in use now, in memory alone."""
        self._used[str(identity.token)] = self._now()

    def is_good(self, token_id: str) -> bool:
        """Return True if there is such a token, and it had not expired when `drop_expired` was called last."""
        return token_id in self._lineages

    def lineage(self, token_id: str) -> str:
        """Return the id by which limits are counted: that of the join token which the token was exchanged for, or its
        own."""
        return self._lineages.get(token_id, token_id)

    # --- what changes them ----------------------------------------------------------------------------------------

    def create(
        self,
        request: TokenRequest,
        by: Actor,
        deliver: Callable[[str], None] = lambda secret: None,
        chosen: str | None = None,
    ) -> NewToken:
        """Make a token. `deliver` gets its secret before it is committed: if that fails, there is no token. `chosen`:
        the secret, where it is not to be made."""
        now = self._now()
        secret, hashed = new_secret(JOIN_PREFIX if request.scope is Scope.JOIN else TOKEN_PREFIX)
        if chosen is not None:
            secret, hashed = chosen, secret_hash(chosen)
        row = TokenRow(
            id=secrets.token_hex(4),
            secret_hash=hashed,
            scope=request.scope,
            note=request.note,
            created_at=now,
            run=request.run,
            names=request.names or (DEFAULT_NAMES if request.scope is Scope.WORKER else None),
            uses=request.uses or (DEFAULT_USES if request.scope is Scope.JOIN else None),
            used=0,
            expires_at=None if request.expires_in_s is None else now + request.expires_in_s,
        )
        with self._changing:
            with self._database.write() as session:
                session.add(row)
                audit.note(session, now, by, "token-created", f"token {row.id} ({row.scope}) was made", row.run)
                deliver(secret)
            self._hold([*self._by_hash.values(), _held(row)])
        return NewToken(**self._info(row).model_dump(), token=secret)

    def rotate(self, token_id: str, by: Actor, of_run: str | None = None) -> NewToken:
        """Give a token another secret. Raises Problem `not-found`, also for one that is not `of_run`, unless that is
        None."""
        with self._changing:
            with self._database.write() as session:
                row = _row(session, token_id, of_run)
                secret, row.secret_hash = new_secret(JOIN_PREFIX if row.scope == Scope.JOIN else TOKEN_PREFIX)
                audit.note(session, self._now(), by, "token-rotated", f"token {row.id} got another secret", row.run)
            self._hold([*self._held_but(token_id), _held(row)])
        return NewToken(**self._info(row).model_dump(), token=secret)

    def revoke(self, token_id: str, by: Actor, of_run: str | None = None) -> None:
        """Delete a token. Raises Problem: not-found, as `rotate` does; forbidden (the last admin token)."""
        with self._changing:
            rest = self._held_but(token_id)
            with self._database.write() as session:
                row = _row(session, token_id, of_run)
                if _held(row).is_lasting_admin and not any(each.is_lasting_admin for each in rest):
                    raise Problem("forbidden", "this is the last admin token; make another before you revoke it")
                session.delete(row)
                audit.note(session, self._now(), by, "token-revoked", f"token {row.id} ({row.scope}) ended", row.run)
            self._hold(rest)

    def exchange(
        self, join_token: Identity, run: str, worker: str, secret: str, by: Actor, check: Callable[[Session], None]
    ) -> tuple[TokenInfo, bool]:
        """Make the worker token `secret`, for this worker of this run alone, in exchange for a use of `join_token`.
        Return it, and True if it is new: the same exchange again is the same one.

        `check` may refuse, by what it reads. Raises Problem: unauthorized, forbidden (used up), invalid-message.
        """
        now, hashed = self._now(), secret_hash(secret)
        with self._changing:
            if self.find(join_token.secret_hash) is None:
                raise Problem("unauthorized", "the join token was revoked, or has expired")
            with self._database.write() as session:
                same = session.scalars(select(TokenRow).where(TokenRow.secret_hash == hashed)).one_or_none()
                if same is not None:
                    if (same.parent, same.run, same.worker) != (join_token.token, run, worker):
                        raise Problem("invalid-message", "token: this is another worker's; draw a random one")
                    return self._info(same), False
                parent = session.get(TokenRow, join_token.token)
                if parent is None:  # with its run, just now
                    raise Problem("unauthorized", "the join token was revoked")
                if parent.uses is not None and parent.used >= parent.uses:
                    detail = f"this join token has been exchanged {parent.used} times, which is all; have an admin"
                    raise Problem("forbidden", f"{detail} make another: outerstep token create --scope join")
                check(session)
                parent.used += 1
                row = TokenRow(
                    id=secrets.token_hex(4),
                    secret_hash=hashed,
                    scope=Scope.WORKER,
                    note=parent.note,
                    created_at=now,
                    run=run,
                    worker=worker,
                    names=1,
                    used=0,
                    parent=parent.id,
                )
                session.add(row)
                message = f"token {parent.id} was exchanged for token {row.id}, of the worker {worker}"
                audit.note(session, now, by, "token-exchanged", message, run)
            self._hold([*self._by_hash.values(), _held(row)])
        return self._info(row), True

    def ensure_admin(self, path: Path, chosen: str | None) -> str:
        """Make an admin token unless there is one that does not expire: the chosen one, or one that is written to
        `path`, readable by its owner alone. Returns what was done, in words; "" where that was nothing."""
        if any(each.is_lasting_admin for each in self._by_hash.values()):
            if chosen is None or self.find(secret_hash(chosen)) is not None:
                return ""
            return "the admin token of the settings is not heeded: there is another one since the first start"
        note = "made at the first start"
        if chosen is not None:
            self.create(TokenRequest(scope=Scope.ADMIN, note=note), Actor(), chosen=chosen)
            return "took the admin token of the settings"
        self.write_admin(path, note)
        return f"made an admin token: {path}"

    def write_admin(self, path: Path, note: str) -> None:
        """Make an admin token and write it to `path`, readable by its owner alone."""
        self.create(TokenRequest(scope=Scope.ADMIN, note=note), Actor(), lambda secret: _write_secret(path, secret))

    # --- what follows from something else -------------------------------------------------------------------------

    def drop_expired(self) -> bool:
        """Note which tokens have expired; return True if any did. They stay in memory, as the clock may be set back."""
        with self._changing:
            before, self._lineages = self._lineages, self._good()
            return not before.keys() <= self._lineages.keys()

    def forget_of(self, run: str) -> None:
        """Forget the tokens for a run that was removed, as were their rows."""
        with self._changing:
            self._hold([each for each in self._by_hash.values() if each.identity.run != run])

    def write_last_uses(self) -> None:
        """Write when tokens were used last, at most once a minute."""
        if 0 < self._write_at - self._now() <= LAST_USES_S:  # more: the clock was set back meanwhile
            return
        self._write_at = self._now() + LAST_USES_S
        with self._changing:
            before, self._used = self._used, {}
            used = dict(before)  # a request may still add to the one before
            if used:
                with self._database.write() as session:
                    for row in session.scalars(select(TokenRow).where(TokenRow.id.in_(used))):
                        row.last_used_at = used[row.id]

    # --- what is shown --------------------------------------------------------------------------------------------

    def listed(self, limit: int, after: str | None, of_run: str | None = None) -> list[TokenInfo]:
        """Return the tokens with an id above `after` (None: from the first on), by id, without their secrets; those
        `of_run` alone unless it is None."""
        query = select(TokenRow).order_by(TokenRow.id).limit(limit)
        if after is not None:
            query = query.where(TokenRow.id > after)
        if of_run is not None:
            query = query.where(TokenRow.run == of_run)
        with self._database.read() as session:
            return [self._info(row) for row in session.scalars(query)]

    def _info(self, row: TokenRow) -> TokenInfo:
        info = TokenInfo.model_validate(row, from_attributes=True)
        return info.model_copy(update={"last_used_at": self._used.get(row.id, row.last_used_at)})


def _held(row: TokenRow) -> _Held:
    lineage = row.parent or row.id
    identity = Identity(Scope(row.scope), row.run, row.worker, row.id, row.names, row.secret_hash, lineage)
    return _Held(identity, row.expires_at)


def _row(session: Session, token_id: str, of_run: str | None) -> TokenRow:
    row = session.get(TokenRow, token_id)
    if row is None or (of_run is not None and row.run != of_run):
        raise Problem("not-found", "there is no such token; `outerstep token ls` lists them")
    return row


def _write_secret(path: Path, secret: str) -> None:
    path.unlink(missing_ok=True)  # an old file of this name may be readable by others
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    fsync(path.parent)

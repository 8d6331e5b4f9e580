"""Bearer tokens: who sends a request, and what it allows. Secrets are random; only their SHA-256 is stored."""

import hashlib
import hmac
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from coordinator.store.database import Database
from coordinator.store.files import fsync
from coordinator.store.tables import TokenRow
from protocol.errors import Problem
from protocol.messages import NewToken, Scope, TokenInfo

TOKEN_PREFIX = "ost_"


def new_secret() -> tuple[str, bytes]:
    """Return a new bearer token and the hash under which it is stored."""
    secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return secret, secret_hash(secret)


def secret_hash(secret: str) -> bytes:
    """Return the SHA-256 of a bearer token."""
    return hashlib.sha256(secret.encode()).digest()


@dataclass(frozen=True)
class Identity:
    """Who sent a request: the holder of an operator's token, or a member (one worker of one run)."""

    scope: Scope | None
    run: str | None = None
    worker: str | None = None

    def allows(self, scope: Scope) -> bool:
        """Return True if the token has this scope; an admin's has all."""
        return self.scope is Scope.ADMIN or self.scope is scope

    def is_member(self, run: str, worker: str) -> bool:
        """Return True if it is this worker of this run."""
        return (self.run, self.worker) == (run, worker)


class Tokens:
    """The operators' tokens, by hash in memory, so that a request costs no query."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changing = threading.Lock()
        with database.read() as session:
            rows = session.scalars(select(TokenRow)).all()
        self._by_hash = {row.secret_hash: (row.id, Scope(row.scope)) for row in rows}

    def identify(self, secret: str) -> Identity | None:
        """Return the holder of an operator's token; None if there is no such token."""
        hashed = secret_hash(secret)
        for stored, (_, scope) in self._by_hash.items():
            if hmac.compare_digest(stored, hashed):
                return Identity(scope)
        return None

    def create(
        self, scope: Scope, note: str, now: float, deliver: Callable[[str], None] = lambda secret: None
    ) -> NewToken:
        """Make a token. `deliver` gets its secret before it is committed: if that fails, there is no token."""
        secret, hashed = new_secret()
        info = TokenInfo(id=secrets.token_hex(4), scope=scope, note=note, created_at=now)
        with self._changing:
            with self._database.write() as session:
                session.add(TokenRow(**info.model_dump(), secret_hash=hashed))
                deliver(secret)
            self._by_hash = {**self._by_hash, hashed: (info.id, scope)}
        return NewToken(**info.model_dump(), token=secret)

    def revoke(self, token_id: str) -> None:
        """Delete a token. Raises Problem: not-found, forbidden (the last admin token)."""
        with self._changing:
            admins = sum(scope is Scope.ADMIN for _, scope in self._by_hash.values())
            with self._database.write() as session:
                row = session.get(TokenRow, token_id)
                if row is None:
                    raise Problem("not-found", f"there is no token {token_id}")
                if row.scope == Scope.ADMIN and admins == 1:
                    raise Problem("forbidden", "this is the last admin token; make another before you revoke it")
                session.delete(row)
            self._by_hash = {hashed: entry for hashed, entry in self._by_hash.items() if entry[0] != token_id}

    def listed(self, limit: int, after: str | None) -> list[TokenInfo]:
        """Return the tokens with an id above `after` (None: from the first on), by id, without their secrets."""
        with self._database.read() as session:
            query = select(TokenRow).order_by(TokenRow.id).limit(limit)
            if after is not None:
                query = query.where(TokenRow.id > after)
            return [
                TokenInfo(id=row.id, scope=Scope(row.scope), note=row.note, created_at=row.created_at)
                for row in session.scalars(query)
            ]

    def ensure_admin(self, path: Path, now: float) -> bool:
        """Make an admin token unless there is one, and write it to `path`, readable by its owner alone.

        Returns True if it was made.
        """
        if any(scope is Scope.ADMIN for _, scope in self._by_hash.values()):
            return False
        self.create(Scope.ADMIN, "made at the first start", now, lambda secret: _write_secret(path, secret))
        return True


def _write_secret(path: Path, secret: str) -> None:
    path.unlink(missing_ok=True)  # an old file of this name may be readable by others
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    fsync(path.parent)

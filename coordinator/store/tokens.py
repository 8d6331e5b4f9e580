"""Bearer tokens. They are kept in memory by the hash of their secrets, so that a request costs no query.

Secrets are random. Only their SHA-256 is stored.
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

from coordinator.store.database import Database
from coordinator.store.identity import Actor, Identity, audit_note
from coordinator.store.tables import TokenRow
from outerstep.common.files import fsync
from protocol.errors import Problem
from protocol.messages import DEFAULT_NAMES, DEFAULT_USES, JOIN_PREFIX, NewToken, Scope, TokenInfo, TokenRequest

TOKEN_PREFIX = "ost_"
LAST_USES_S = 60.0  # between writes of the times when tokens were last used


def new_secret(prefix: str = TOKEN_PREFIX) -> tuple[str, bytes]:
    """Return a new bearer token and its hash."""
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
    """All tokens except those of members. `now` returns seconds since 1970. Every change is recorded in the audit
    log."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database, self._now = database, now
        self._changing = threading.Lock()
        self._used: dict[str, float] = {}  # since the last write
        self._write_at = now() + LAST_USES_S
        self._by_hash: dict[bytes, _Held] = {}
        self._lineages: dict[str, str] = {}  # by id; only for tokens that have not expired
        with database.read() as session:
            self._hold([_held(row) for row in session.scalars(select(TokenRow))])

    def _hold(self, held: list[_Held]) -> None:
        self._by_hash = {each.identity.secret_hash: each for each in held}
        self._lineages = self._good()

    def _good(self) -> dict[str, str]:
        now, held = self._now(), self._by_hash.values()
        good = [each.identity for each in held if each.expires_at is None or each.expires_at > now]
        return {str(each.token): str(each.lineage) for each in good}

    def _held_without(self, token_id: str) -> list[_Held]:
        return [each for each in self._by_hash.values() if each.identity.token != token_id]

    # --- for every request --------------------------------------------------------------------------------------------

    def find(self, hashed: bytes) -> Identity | None:
        """Return the holder of the token with this hash; None if there is no such token or it has expired."""
        held = self._by_hash.get(hashed)
        if held is None or (held.expires_at is not None and held.expires_at <= self._now()):
            return None
        return held.identity

    def note_use(self, identity: Identity) -> None:
        """Record in memory that the token is used now."""
        self._used[str(identity.token)] = self._now()

    def is_good(self, token_id: str) -> bool:
        """Return True if the token exists and had not expired when `drop_expired` was last called."""
        return token_id in self._lineages

    def lineage(self, token_id: str) -> str:
        """Return the id that rate limits count by: that of the join token that was exchanged for this one, or its
        own."""
        return self._lineages.get(token_id, token_id)

    # --- changes ------------------------------------------------------------------------------------------------------

    def create(
        self,
        request: TokenRequest,
        by: Actor,
        deliver: Callable[[str], None] = lambda secret: None,
        chosen: str | None = None,
    ) -> NewToken:
        """Create a token. `deliver` gets its secret before the commit; if it raises, no token is created. `chosen`: the
        secret to use; None for a random one."""
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
                audit_note(session, now, by, "token-created", f"token {row.id} ({row.scope}) was created", row.run)
                deliver(secret)
            self._hold([*self._by_hash.values(), _held(row)])
        return NewToken(**self._info(row).model_dump(), token=secret)

    def rotate(self, token_id: str, by: Actor, of_run: str | None = None) -> NewToken:
        """Give a token a new secret. Raises Problem `not-found` if there is no such token, or it is not for `of_run`
        (None: for any run)."""
        with self._changing:
            with self._database.write() as session:
                row = _row(session, token_id, of_run)
                secret, row.secret_hash = new_secret(JOIN_PREFIX if row.scope == Scope.JOIN else TOKEN_PREFIX)
                audit_note(session, self._now(), by, "token-rotated", f"token {row.id} got a new secret", row.run)
            self._hold([*self._held_without(token_id), _held(row)])
        return NewToken(**self._info(row).model_dump(), token=secret)

    def revoke(self, token_id: str, by: Actor, of_run: str | None = None) -> None:
        """Delete a token. Raises Problem: not-found, as `rotate` does; forbidden, if it is the last admin token."""
        with self._changing:
            rest = self._held_without(token_id)
            with self._database.write() as session:
                row = _row(session, token_id, of_run)
                if _held(row).is_lasting_admin and not any(each.is_lasting_admin for each in rest):
                    raise Problem("forbidden", "this is the last admin token; create another one before you revoke it")
                session.delete(row)
                audit_note(
                    session, self._now(), by, "token-revoked", f"token {row.id} ({row.scope}) was revoked", row.run
                )
            self._hold(rest)

    def exchange(
        self, join_token: Identity, run: str, worker: str, secret: str, by: Actor, check: Callable[[Session], None]
    ) -> tuple[TokenInfo, bool]:
        """Create the worker token `secret`, valid only for this worker of this run, in exchange for one use of
        `join_token`. Return it, and True if it is new: repeating the same exchange returns the same token.

        Raises Problem: unauthorized; forbidden, if the join token is used up; invalid-message; and whatever `check`
        raises.
        """
        now, hashed = self._now(), secret_hash(secret)
        with self._changing:
            if self.find(join_token.secret_hash) is None:
                raise Problem("unauthorized", "the join token was revoked, or has expired")
            with self._database.write() as session:
                same = session.scalars(select(TokenRow).where(TokenRow.secret_hash == hashed)).one_or_none()
                if same is not None:
                    if (same.parent, same.run, same.worker) != (join_token.token, run, worker):
                        raise Problem("invalid-message", "token: another worker has it; choose a random one")
                    return self._info(same), False
                parent = session.get(TokenRow, join_token.token)
                if parent is None:  # it was deleted just now, together with its run
                    raise Problem("unauthorized", "the join token was revoked")
                if parent.uses is not None and parent.used >= parent.uses:
                    detail = f"this join token was exchanged {parent.used} times, which is its limit; ask an admin"
                    raise Problem("forbidden", f"{detail} for another one: outerstep token create --scope join")
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
                message = f"token {parent.id} was exchanged for token {row.id} of the worker {worker}"
                audit_note(session, now, by, "token-exchanged", message, run)
            self._hold([*self._by_hash.values(), _held(row)])
        return self._info(row), True

    def ensure_admin(self, path: Path, chosen: str | None) -> str:
        """Create an admin token unless there is one that never expires. Its secret is `chosen`; if that is None, a
        random one is written to `path`, readable by its owner only. Return a sentence about what was done; "" if
        nothing."""
        if any(each.is_lasting_admin for each in self._by_hash.values()):
            if chosen is None or self.find(secret_hash(chosen)) is not None:
                return ""
            return "the admin token in the settings is ignored: another one exists since the first start"
        note = "made at the first start"
        if chosen is not None:
            self.create(TokenRequest(scope=Scope.ADMIN, note=note), Actor(), chosen=chosen)
            return "created the admin token in the settings"
        self.write_admin(path, note)
        return f"created an admin token: {path}"

    def write_admin(self, path: Path, note: str) -> None:
        """Create an admin token and write it to `path`, readable by its owner only."""
        self.create(TokenRequest(scope=Scope.ADMIN, note=note), Actor(), lambda secret: _write_secret(path, secret))

    # --- consequences of other events ---------------------------------------------------------------------------------

    def drop_expired(self) -> bool:
        """Record which tokens have expired. Return True if any did. They stay in memory, because the clock may be set
        back."""
        with self._changing:
            before, self._lineages = self._lineages, self._good()
            return not before.keys() <= self._lineages.keys()

    def forget_of(self, run: str) -> None:
        """Forget the tokens of a removed run; their rows are already deleted."""
        with self._changing:
            self._hold([each for each in self._by_hash.values() if each.identity.run != run])

    def write_last_uses(self) -> None:
        """Write the times when tokens were last used, at most once per LAST_USES_S seconds."""
        if 0 < self._write_at - self._now() <= LAST_USES_S:  # a larger difference means that the clock was set back
            return
        self._write_at = self._now() + LAST_USES_S
        with self._changing:
            before, self._used = self._used, {}
            used = dict(before)  # a request may still write to the old dict
            if used:
                with self._database.write() as session:
                    for row in session.scalars(select(TokenRow).where(TokenRow.id.in_(used))):
                        row.last_used_at = used[row.id]

    # --- listing ------------------------------------------------------------------------------------------------------

    def listed(self, limit: int, after: str | None, of_run: str | None = None) -> list[TokenInfo]:
        """Return the tokens with an id above `after` (None: all), ordered by id, without secrets. `of_run`: only tokens
        for this run."""
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
        raise Problem("not-found", "there is no such token; `outerstep token ls` lists all")
    return row


def _write_secret(path: Path, secret: str) -> None:
    path.unlink(missing_ok=True)  # an older file of this name may be readable by others
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    fsync(path.parent)

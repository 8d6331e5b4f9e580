"""The upload of a contribution to the coordinator's store: announce it, send it, commit it."""

import base64
import hashlib
from collections.abc import Callable, Sequence

import httpx
from blake3 import blake3

from outerstep.common.connections import error_text
from protocol import messages
from protocol.digest import Buffer
from protocol.errors import Problem, Transient, UnexpectedAnswer
from worker.line.store import check_store_headers, check_store_url, origin
from worker.line.transfer import Channel, pieces_of


def announcement(buffers: Sequence[memoryview]) -> messages.DirectUpload:
    """Return what announces a payload. `buffers`: its bytes, first those before its first frame."""
    blake, sha256 = blake3(), hashlib.sha256()
    for each in buffers:
        blake.update(each)
        sha256.update(each)
    return messages.DirectUpload(
        header=base64.b64encode(buffers[0]).decode(),
        bytes=sum(len(each) for each in buffers),
        digest=blake.hexdigest(),
        sha256=sha256.hexdigest(),
    )


class StoreUpload:
    """The upload of one contribution. `buffers`: the payload, its header first.

    `grant` and `commit` send the announcement to the coordinator. `on_line` is called when the upload gets a slot.
    """

    def __init__(
        self,
        channel: Channel,
        buffers: Sequence[Buffer],
        grant: Callable[[messages.DirectUpload], messages.UploadGrant],
        commit: Callable[[messages.DirectUpload], object],
        on_line: Callable[[], object],
    ) -> None:
        self._channel, self._grant, self._commit, self._on_line = channel, grant, commit, on_line
        self._buffers = [memoryview(each).cast("B") for each in buffers]
        self._announced = announcement(self._buffers)
        self._size = self._announced.bytes

    def __call__(self) -> bool:
        """Upload and commit the contribution. Return False if it has to go through the coordinator. Raises Problem,
        UnexpectedAnswer and Stopped."""
        path, retry = self._channel.store, self._channel.retry
        while path.usable:
            grant = self._grant(self._announced)
            if grant.accepted:
                return True
            if grant.url is None:
                path.avoid(grant.reason)
                return False
            try:
                check_store_url(grant.url, self._channel.http.base_url)
                check_store_headers(grant.headers)
            except UnexpectedAnswer as error:
                path.avoid(str(error))
                return False
            try:
                self._send(grant.url, grant.headers)
                self._commit(self._announced)
            except Transient as error:
                path.failed(str(error))
            except Problem as problem:
                if problem.slug != "not-uploaded":
                    raise
                path.failed(problem.detail)
            else:
                path.worked(grant.url)
                return True
            if path.usable:
                retry.pause(retry.backoff_s(1))
        return False

    def _send(self, url: str, headers: dict[str, str]) -> None:
        """Send the payload, once. Raises Transient if it did not arrive."""
        channel = self._channel
        pieces = pieces_of(self._buffers, 0, self._size, channel.line.up.piece_bytes)
        with channel.line.up.slot() as slot, channel.line.stalls.watched():
            self._on_line()
            try:
                with channel.up.stream(
                    "PUT",
                    url,
                    content=channel.sent(map(bytes, pieces), slot),
                    headers={**headers, "Content-Length": str(self._size)},
                    timeout=channel.timeout(),
                    extensions=channel.traced("up"),
                ) as answer:
                    if not answer.is_success and answer.status_code != 412:  # 412: an earlier attempt has arrived
                        raise Transient(f"the store at {origin(url)} answers {answer.status_code} to an upload")
            except httpx.TransportError as error:
                raise Transient(f"the store at {origin(url)} cannot be reached: {error_text(error)}") from error

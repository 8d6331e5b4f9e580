"""Contributions that workers upload to the store themselves, without their bytes passing through the coordinator.

A worker announces the header, size and digests. The coordinator checks what they allow, and signs an upload of exactly
those bytes. Once the worker has made it, it commits the same announcement: now the store must confirm size, checksum
and header, and only then is the row written. So nothing is kept between the two requests but the grant, which limits
how much a worker may leave in the store; blobs that are not committed in time are deleted.

The values are checked when the blob is read, soon after the commit or for the verdict (`aggregation/fragment.py`).
"""

import base64
import logging
from collections.abc import Callable
from dataclasses import replace

from blake3 import blake3

from coordinator.aggregation.fragment import examine, sketch_key
from coordinator.aggregation.measuring import Measure, measure_payload
from coordinator.aggregation.tasks import Given
from coordinator.run.live_run import Arrival, LiveRun
from coordinator.store.blobs import DirectAccess, Uploaded
from coordinator.sync import admission, delegating
from coordinator.sync.contributing import commit_blob
from coordinator.trust.verdicts import keep_in_memory
from protocol.errors import OuterstepError, Problem, WireError, WireFault
from protocol.fragments import Layout
from protocol.messages import ContributionReply, DirectUpload, FragmentState, UploadGrant
from protocol.wire import ContributionHeader, Payload, max_payload_bytes, max_payloads_bytes

ROUNDS = 4  # rounds of payloads that a worker may have been granted and not committed
LEFT_S = 600.0  # how long an upload that began in time may take, before its blob is deleted

logger = logging.getLogger(__name__)


def grant(run: LiveRun, layout: Layout, worker: str, round_: int, fragment: int, upload: DirectUpload) -> UploadGrant:
    """Return where the worker may upload the contribution. Raises Problem."""
    access, digest, expires_s = run.blobs.direct, bytes.fromhex(upload.digest), run.members.lease_s
    with admission.noting_rejected(run, worker, round_, fragment):
        header = _checked(run, layout, worker, round_, fragment, upload)
        if admission.admit(run, header, digest) is None:
            return UploadGrant(accepted=True)
    if access is None:
        return UploadGrant(reason="the coordinator's store takes no direct uploads")
    if worker in run.not_direct:
        return UploadGrant(reason=f"{worker} has uploaded an invalid payload to the store")
    name = run.names.contribution(round_, fragment, worker, digest)
    most = ROUNDS * max_payloads_bytes(run.spec.sync.upload_codec, len(layout.fragments), layout.total_elements)
    run.uploads.grant(name, worker, upload.bytes, expires_s, most=most)
    signed = access.upload(name, bytes.fromhex(upload.sha256), expires_s)
    return UploadGrant(url=signed.url, headers=signed.headers, expires_s=expires_s)


def commit(
    run: LiveRun, layout: Layout, worker: str, round_: int, fragment: int, upload: DirectUpload
) -> ContributionReply:
    """Accept a contribution that the store has. Raises Problem: `not-uploaded` if it does not."""
    access = run.blobs.direct
    digest, sha256 = bytes.fromhex(upload.digest), bytes.fromhex(upload.sha256)
    name = run.names.contribution(round_, fragment, worker, digest)
    with admission.noting_rejected(run, worker, round_, fragment):
        header = _checked(run, layout, worker, round_, fragment, upload)
        if access is None or worker in run.not_direct:
            raise Problem("not-uploaded", "this contribution must be uploaded to the coordinator")
        lateness, created = admission.admit(run, header, digest), False
        if lateness is not None:
            arrival = Arrival(header, name, digest, upload.bytes, None, None, lateness, sha256)
            created = commit_blob(run, arrival, lambda: _confirm(access, name, upload))
    run.uploads.end_grant(name)
    if created and not delegating.is_possible(run):
        run.context.submit(_examine, run, header, digest, upload.bytes)
    return ContributionReply(round=round_, fragment=fragment, digest=upload.digest, created=created)


def discard_expired(run: LiveRun) -> None:
    """Delete, on another thread, the blobs of granted uploads that were not committed in time."""
    discard = run.uploads.end_expired(LEFT_S)
    if discard is not None:
        run.context.submit(_discard, run.name, discard)


def _discard(run: str, discard: Callable[[], None]) -> None:
    try:
        discard()
    except OSError as error:
        logger.warning("%s: blobs of uploads that were not committed remain: %s", run, error)


def _checked(
    run: LiveRun, layout: Layout, worker: str, round_: int, fragment: int, upload: DirectUpload
) -> ContributionHeader:
    """Return the header, after all checks that need neither bytes nor the run's state. Raises Problem."""
    limit = max_payload_bytes(run.spec.sync.upload_codec, layout.elements[fragment])
    if upload.bytes > limit:
        raise Problem("payload-too-large", f"the payload has {upload.bytes} bytes; at most {limit} are accepted here")
    try:
        header = _head(upload).header
    except WireError as error:
        raise Problem("invalid-payload", f"{error.fault}: {error}") from error
    if not isinstance(header, ContributionHeader):
        raise Problem("invalid-payload", f"the payload is a {header.kind}, expected a contribution")
    admission.check_header(run, layout, worker, round_, fragment, header)
    return header


def _head(upload: DirectUpload) -> Payload:
    """Return a payload whose frames cannot be read. Raises WireError if the header is invalid, or describes
    another length than was announced."""
    head = _decoded(upload)

    def read(offset: int, length: int) -> bytes:
        if offset + length > len(head):
            raise WireError(WireFault.LENGTH, f"{len(head)} bytes of header were sent, too few")
        return head[offset : offset + length]

    payload = Payload(read, upload.bytes)
    if payload.offsets[0] != len(head):
        raise WireError(WireFault.LENGTH, f"the header ends at byte {payload.offsets[0]}, but {len(head)} were sent")
    return payload


def _decoded(upload: DirectUpload) -> bytes:
    try:
        return base64.b64decode(upload.header, validate=True)
    except ValueError as error:  # characters that are not base64's, or not even ASCII
        raise WireError(WireFault.HEADER, f"the header is not base64: {error}") from error


def _confirm(access: DirectAccess, name: str, upload: DirectUpload) -> None:
    """Raise Problem unless the size, the SHA-256 digest and the header of the stored object are as announced."""
    found, expected = access.uploaded(name), Uploaded(upload.bytes, bytes.fromhex(upload.sha256))
    if found is None:
        raise Problem("not-uploaded", f"the store has no {name}")
    if found != expected:
        raise Problem("digest-mismatch", f"the store has {found.size} bytes with another digest than announced")
    head = _decoded(upload)
    try:
        beginning = access.beginning(name, len(head))
    except FileNotFoundError:
        raise Problem("not-uploaded", f"the store has lost {name}") from None
    if beginning != head:
        raise Problem("invalid-payload", "the uploaded payload has another header than announced")


def _examine(run: LiveRun, header: ContributionHeader, digest: bytes, size: int) -> None:
    """Read the contribution while the round still waits for others: then its measure is there when it is judged, and
    its bytes are in memory, if there is room, or in a local copy when it is averaged."""
    opening, worker = run.open, header.worker
    fragment = None if opening is None or opening.number != header.round else opening.fragments[header.fragment]
    each = None if fragment is None else fragment.contributed.get(worker)
    if fragment is None or each is None or each.digest != digest:
        return
    name = run.names.contribution(header.round, header.fragment, worker, digest)
    key = sketch_key(run.context.secret, run.name, header.round, header.fragment)
    try:
        content = _in_memory(run, name, digest, size)
        if content is None:
            found = examine(run.blobs, name, Given(digest=digest, sha256=each.sha256, tokens=each.tokens), key)
        else:
            found = measure_payload(Payload.from_bytes(content), key)
    except (OSError, OuterstepError, ValueError, LookupError) as error:
        # It is examined again for its verdict, where an error is reported.
        logger.debug("%s: contribution of %s to round %d not examined: %s", run.name, worker, header.round, error)
        return
    measured = keep_in_memory(run, found) if isinstance(found, Measure) else None
    with run.lock:
        if fragment.contributed.get(worker) != each or fragment.state is FragmentState.PUBLISHED:
            return
        if measured is not None:
            fragment.contributed[worker] = replace(each, measured=measured)
        if content is not None:
            fragment.contents[worker] = content


def _in_memory(run: LiveRun, name: str, digest: bytes, size: int) -> memoryview | None:
    """Return the bytes of the blob; None if there is no room for them. Raises OSError if they have another digest."""
    content = run.context.memory.take(size)
    if content is None:
        return None
    with run.blobs.open(name, fresh=True) as reader:
        if reader.read_into(content, 0) != size or blake3(content).digest() != digest:
            raise OSError(f"{name} has other bytes than announced")
    return content

"""Signatures of webhooks as the Standard Webhooks specification has them.

One scheme in both directions: deliveries sign with it, webhook sources verify with it. A signature covers the
message's id, its time and its exact bytes, so none of them can be changed or sent again later under another name.
A header may hold several signatures and a verifier several keys, which is how a key is rotated without a gap.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable
from enum import StrEnum

WEBHOOK_ID = "webhook-id"
WEBHOOK_TIMESTAMP = "webhook-timestamp"
WEBHOOK_SIGNATURE = "webhook-signature"
WHSEC = "whsec_"
TOLERANCE_SECONDS = 300
MIN_KEY_BYTES = 16
"""The specification asks for 24 to 64 bytes; shorter keys are met, and below this one is a password."""
MAX_KEY_BYTES = 256
_SCHEME = "v1,"
_MAX_SIGNATURES = 16
_MAX_TIMESTAMP_DIGITS = 12


class SignatureVerdict(StrEnum):
    """``malformed``: a header that isn't one of the scheme. ``stale``: signed too long ago, or in the future."""

    VALID = "valid"
    MALFORMED = "malformed"
    STALE = "stale"
    WRONG_SIGNATURE = "wrong_signature"


def decode_secret(text: str) -> bytes:
    """The key of a secret as people paste it: ``whsec_`` and base64, or base64 alone. ``ValueError`` otherwise;
    its message doesn't quote the secret."""
    encoded = text.strip().removeprefix(WHSEC)
    try:
        key = base64.b64decode(encoded.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        # Without the cause: its message would show the secret in a traceback.
        raise ValueError(f"a signing secret is {WHSEC} and base64") from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a signing key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")
    return key


def encode_secret(key: bytes) -> str:
    return WHSEC + base64.b64encode(key).decode()


def sign(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """One signature, as it stands in the header. ``ValueError`` for an id that no receiver accepts."""
    if "." in message_id:
        raise ValueError("a message's id has no full stop")
    signed = f"{message_id}.{timestamp}.".encode() + body
    return _SCHEME + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def signed_headers(keys: Iterable[bytes], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers; during a rotation a message is signed with each of its keys."""
    signatures = " ".join(sign(key, message_id, timestamp, body) for key in keys)
    return {WEBHOOK_ID: message_id, WEBHOOK_TIMESTAMP: str(timestamp), WEBHOOK_SIGNATURE: signatures}


def verify(
    keys: Iterable[bytes],
    *,
    message_id: str,
    timestamp: str,
    signature: str,
    body: bytes,
    now: float,
    tolerance: float = TOLERANCE_SECONDS,
) -> SignatureVerdict:
    """Judge a message by its three headers and its exact bytes.

    An id with a full stop is malformed, as the specification has it: id, time and body are signed with full stops
    between them, so the same signature would hold with the time and a part of the body in the id.

    Every key is compared with every signature in constant time, and time is judged last: an answer shows nothing
    about when a signature would have been right.
    """
    if not message_id or "." in message_id or not timestamp.isascii() or not timestamp.isdigit():
        return SignatureVerdict.MALFORMED
    signatures = signature.split()
    if len(timestamp) > _MAX_TIMESTAMP_DIGITS or not 0 < len(signatures) <= _MAX_SIGNATURES:
        return SignatureVerdict.MALFORMED
    given = [each.encode() for each in signatures if each.startswith(_SCHEME)]
    signed = f"{message_id}.{timestamp}.".encode() + body
    matched = False
    for key in keys:
        wanted = _SCHEME.encode() + base64.b64encode(hmac.digest(key, signed, hashlib.sha256))
        for each in given:
            # No early end: how many were compared would show which key matched.
            matched |= hmac.compare_digest(wanted, each)
    if not matched:
        return SignatureVerdict.WRONG_SIGNATURE
    return SignatureVerdict.VALID if abs(now - int(timestamp)) <= tolerance else SignatureVerdict.STALE

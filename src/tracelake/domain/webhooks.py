"""Calls of webhooks: whether one is authentic, and by which id it is known; and secrets.

Decided from headers, body, keys and time. The work doesn't depend on whether there is such a source: without keys a
call is judged by keys that nobody has, and is refused in the same time. Every key is compared with all that was
sent, so the time shows neither which one matched nor how far.

    standard   webhook-id, webhook-timestamp, webhook-signature (Standard Webhooks), at most five minutes old
    github     X-Hub-Signature-256 over the body; the id is X-GitHub-Delivery, which is not signed
    bearer     Authorization: Bearer; the id is webhook-id or Idempotency-Key, and without one each call is new
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from tracelake.domain import standard_webhooks
from tracelake.domain.dag.model import Signature
from tracelake.domain.errors import BadRequest, Unauthenticated
from tracelake.domain.standard_webhooks import (
    WEBHOOK_ID,
    WEBHOOK_SIGNATURE,
    WEBHOOK_TIMESTAMP,
    SignatureVerdict,
    decode_secret,
    encode_secret,
)

GITHUB_SIGNATURE = "x-hub-signature-256"
GITHUB_DELIVERY = "x-github-delivery"
AUTHORIZATION = "authorization"
IDEMPOTENCY_KEY = "idempotency-key"
HEADERS = (
    *(WEBHOOK_ID, WEBHOOK_TIMESTAMP, WEBHOOK_SIGNATURE, GITHUB_SIGNATURE, GITHUB_DELIVERY),
    *(AUTHORIZATION, IDEMPOTENCY_KEY, "content-type"),
)
MAX_SECRETS = 3
"""The most that a source has at a time. A call is judged by this number of keys, whether it has them or not."""
_ID = re.compile(r"[\x21-\x7e]{1,200}")
_NOBODYS = tuple(encode_secret(secrets.token_bytes(32)) for _ in range(MAX_SECRETS))


def new_secret() -> str:
    """A secret in the form of Standard Webhooks; the other kinds use its text."""
    return encode_secret(secrets.token_bytes(32))


@dataclass(frozen=True, slots=True)
class Caller:
    """An authentic call. ``delivery_id`` is None when it has none of its own."""

    delivery_id: str | None


def judge_call(
    signature: Signature, headers: Mapping[str, str], body: bytes, keys: Sequence[str], now: float
) -> Caller:
    """Raises ``Unauthenticated`` for a call whose sender doesn't know the secret, ``BadRequest`` for an authentic
    one that is too old or names no delivery."""
    # Padded, so that a source with one secret, with several and one that doesn't exist cost the same.
    keys = (*keys, *_NOBODYS)[:MAX_SECRETS]
    match signature:
        case Signature.STANDARD:
            return _standard(headers, body, keys, now)
        case Signature.GITHUB:
            return _github(headers, body, keys)
        case Signature.BEARER:
            return _bearer(headers, keys)
        case never:
            assert_never(never)


def _standard(headers: Mapping[str, str], body: bytes, keys: Sequence[str], now: float) -> Caller:
    message_id, timestamp = headers.get(WEBHOOK_ID, ""), headers.get(WEBHOOK_TIMESTAMP, "")
    signature = headers.get(WEBHOOK_SIGNATURE, "")
    verdict = standard_webhooks.verify(
        [decode_secret(key) for key in keys],
        message_id=message_id,
        timestamp=timestamp,
        signature=signature,
        body=body,
        now=now,
    )
    match verdict:
        case SignatureVerdict.VALID:
            return Caller(_checked(message_id, WEBHOOK_ID))
        case SignatureVerdict.STALE:
            raise BadRequest(
                "StaleDelivery", "the delivery was signed more than five minutes from now: sign it again"
            )
        case SignatureVerdict.MALFORMED if message_id and timestamp and signature:
            # No key was compared: this one isn't authentic, whatever else is wrong with it.
            raise Unauthenticated(
                "MalformedSignature",
                f"{WEBHOOK_ID} has a full stop, or {WEBHOOK_TIMESTAMP} or {WEBHOOK_SIGNATURE} is malformed",
            )
        case SignatureVerdict.MALFORMED:
            raise Unauthenticated(
                "SignatureMissing", f"{WEBHOOK_ID}, {WEBHOOK_TIMESTAMP} and {WEBHOOK_SIGNATURE} are required"
            )
        case SignatureVerdict.WRONG_SIGNATURE:
            raise _wrong()
        case never:
            assert_never(never)


def _github(headers: Mapping[str, str], body: bytes, keys: Sequence[str]) -> Caller:
    given = headers.get(GITHUB_SIGNATURE, "").encode("utf-8", "replace")
    matched = False
    for key in keys:
        wanted = b"sha256=" + hmac.new(key.encode(), body, hashlib.sha256).hexdigest().encode()
        matched |= hmac.compare_digest(wanted, given)
    if not given:
        raise Unauthenticated("SignatureMissing", f"{GITHUB_SIGNATURE} is required")
    if not matched:
        raise _wrong()
    return Caller(_checked(headers.get(GITHUB_DELIVERY, ""), GITHUB_DELIVERY))


def _bearer(headers: Mapping[str, str], keys: Sequence[str]) -> Caller:
    scheme, _, token = headers.get(AUTHORIZATION, "").partition(" ")
    given = hashlib.sha256(token.strip().encode("utf-8", "replace")).digest()
    matched = False
    for key in keys:
        matched |= hmac.compare_digest(hashlib.sha256(key.encode()).digest(), given)
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated(
            "SignatureMissing", "'Authorization: Bearer' with the source's secret is required"
        )
    if not matched:
        raise _wrong()
    for name in (WEBHOOK_ID, IDEMPOTENCY_KEY):
        if name in headers:
            return Caller(_checked(headers[name], name))
    return Caller(None)


def _wrong() -> Unauthenticated:
    return Unauthenticated("WrongSignature", "the call isn't signed with this source's secret")


def _checked(delivery_id: str, name: str) -> str:
    if _ID.fullmatch(delivery_id) is None:
        raise BadRequest("MalformedDeliveryId", f"{name} must be 1 to 200 printable ASCII characters")
    return delivery_id
